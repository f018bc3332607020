"""The front door: one request from its tensors to its last response, over any engine that speaks the contract."""
