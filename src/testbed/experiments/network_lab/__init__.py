"""Make several hosts on one machine: network namespaces with links of chosen rate and delay, and runs in them. Root
only."""
