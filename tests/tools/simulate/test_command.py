import json
import re

import pytest

from tools.benchmarks.step_time_model import STEPS_FILE
from tools.simulate.__main__ import VARIED, main, make_parser, scenario_of, traffic_of

SMALL = ["--warm-up", "0", "--period", "150", "--load", "2", "--policies", "cache_aware", "round_robin"]


def command(monkeypatch, capsys, *args):
    monkeypatch.setattr("tools.simulate.__main__._REPLICAS_TOGETHER", 1)  # one replication is enough here
    monkeypatch.setattr("sys.argv", ["simulate", *SMALL, *args])
    main()
    return capsys.readouterr().out


def rows(text):
    return [line for line in text.splitlines() if re.match(r"\| (cache_aware|round_robin) ", line)]


def test_the_table_has_a_row_for_each_policy_and_number_and_the_plot_is_drawn(monkeypatch, capsys, tmp_path):
    text = command(monkeypatch, capsys, "--replicas", "2", "4", "--plot", str(tmp_path / "a" / "plot.png"))
    assert [row.split(" | ")[:3] for row in rows(text)] == [
        ["| cache_aware", "2", "3,125"],
        ["| cache_aware", "4", "6,250"],
        ["| round_robin", "2", "3,125"],
        ["| round_robin", "4", "6,250"],
    ]
    assert (tmp_path / "a" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_given_step_times_are_used_and_assumptions_are_printed(monkeypatch, capsys, tmp_path):
    data = json.loads(STEPS_FILE.read_text())
    data["machine"] = "another machine"
    for step in data["steps"]:
        step["seconds"] /= 100
    (tmp_path / "steps.json").write_text(json.dumps(data))
    args = ("--replicas", "2", "--policies", "round_robin")
    measured = command(monkeypatch, capsys, *args, "--steps", str(tmp_path / "steps.json"))
    scaled = command(monkeypatch, capsys, *args, "--speed", "100")
    assert "another machine" in measured
    assert "100 times as fast: an assumption" in scaled and "assumption" not in measured
    assert rows(measured) == rows(scaled)
    assert rows(measured) != rows(command(monkeypatch, capsys, *args))


@pytest.mark.parametrize("name", VARIED)
def test_each_varied_option_changes_the_scenario_or_traffic(name):
    args = make_parser().parse_args([])
    seen = []
    for changes in VARIED[name].values.values():
        changed = type(args)(**(vars(args) | changes))
        one = (scenario_of(changed, 16, "session"), traffic_of(changed, 16), changed.seed)
        assert one not in seen
        seen.append(one)


def test_varied_stores_add_columns_and_processes_change_no_results(monkeypatch, capsys):
    args = ("--replicas", "5", "--policies", "round_robin", "--vary")
    text = command(monkeypatch, capsys, *args, "store", "lost", "--processes", "2")
    stores, losses = text.split("| policy | ")[1:]
    assert stores.startswith("store, MB/s") and "from store" in stores
    assert losses.startswith("replicas lost") and "from store" not in losses
    assert len(rows(stores)) == len(VARIED["store"].values)
    assert len(rows(losses)) == len(VARIED["lost"].values)
    # No store and no loss give the same row.
    assert rows(losses)[0].split(" | ")[2:11] == rows(stores)[0].split(" | ")[2:11]
    assert rows(command(monkeypatch, capsys, *args, "lost", "--processes", "1")) == rows(losses)
