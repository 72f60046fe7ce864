"""Child process that prints the Metal source that MLX generates for a kernel.

MLX prints it from C++ on file descriptor 1 when a kernel is called with ``verbose=True`` inside ``mx.export_function``,
with or without Metal. Requests and responses are lines of JSON on separate descriptors.
"""

import json
import os
import sys
import tempfile


def generated_source(request: dict) -> str:
    import mlx.core as mx

    kernel = mx.fast.metal_kernel(**request["constructor"])
    template = [
        (name, getattr(mx, value["dtype"]) if isinstance(value, dict) else value) for name, value in request["template"]
    ]

    def call(*inputs: mx.array) -> list[mx.array]:
        return kernel(
            inputs=list(inputs),
            template=template,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)] * len(request["outputs"]),
            output_dtypes=[getattr(mx, d) for d in request["outputs"]],
            verbose=True,
        )

    inputs = [mx.zeros(i["shape"], getattr(mx, i["dtype"])) for i in request["inputs"]]
    with tempfile.TemporaryFile() as captured, tempfile.TemporaryDirectory() as scratch:
        sys.stdout.flush()
        saved = os.dup(1)
        os.dup2(captured.fileno(), 1)
        try:
            mx.export_function(os.path.join(scratch, "traced.mlxfn"), call, *inputs)
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        captured.seek(0)
        return captured.read().decode()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    # Only responses may reach the pipe.
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = {"source": generated_source(json.loads(line))}
        except Exception as error:  # noqa: BLE001  (whatever MLX raises goes back to the caller)
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
