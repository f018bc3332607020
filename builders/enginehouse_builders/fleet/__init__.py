"""Several servers: changed one after the other, halted at the first that fails."""
