"""Model of the time that attention takes on Apple GPUs: bytes over bandwidth, instructions over issue rate.

``facts`` has published facts of the chips, and published speeds to compare with. ``kernels`` counts the cycles of
compiled kernels. ``model`` has the time of a launch. ``attention`` lists the launches of a layer, and ``page`` writes
docs/dev/kernel_times.md. Nothing here is measured.
"""
