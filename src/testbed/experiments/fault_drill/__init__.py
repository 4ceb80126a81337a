"""The fault drill: runs that are struck by a fault, resumed, and held against the run that nobody disturbed."""
