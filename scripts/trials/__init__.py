"""What ``scripts/faults`` and ``scripts/soak`` run."""
