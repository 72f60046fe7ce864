"""References for the doctor's comparisons, computed in float64."""
