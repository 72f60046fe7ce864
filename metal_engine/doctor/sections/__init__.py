"""Parts of the doctor's full report."""
