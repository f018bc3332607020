"""What a spec will need on a device: bytes, sequences that fit, speed, money, energy; before anything is built."""
