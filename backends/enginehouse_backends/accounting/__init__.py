"""Every token, its money and its energy: per request and tenant, exactly once, on every exit."""
