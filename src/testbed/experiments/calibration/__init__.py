"""Measure the machine at hand for the planner, and how far its predictions are from measured runs."""
