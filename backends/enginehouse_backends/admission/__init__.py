"""Who may start now: a bounded queue with tenants' fair shares, priorities and deadlines."""
