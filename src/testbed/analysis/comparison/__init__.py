"""Two configurations against each other: a ratio with its interval, a verdict, and what else differs."""
