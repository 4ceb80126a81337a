"""Make several hosts on one machine: network namespaces with links of a chosen rate, and runs in them. Root only."""
