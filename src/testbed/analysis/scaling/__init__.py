"""Scaling of a strategy: speed-up, efficiency, fits, time to a loss, and tables in the shape of earlier studies."""
