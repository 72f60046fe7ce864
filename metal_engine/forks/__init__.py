"""Processes that fork for each task, with limits on time and memory."""
