"""Starting and stopping a real tritonserver on this host."""
