"""What is wrong with a comparison, in our files and in those of other programs."""
