"""Load generation without a client: workloads, arrival times, statistics, results, reports and their comparison."""
