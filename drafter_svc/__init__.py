"""The drafter service: owns draft state only and may vanish at any time."""
