"""The file in which an operator names the services that share a host."""
