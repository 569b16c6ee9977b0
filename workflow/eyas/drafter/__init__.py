"""The EAGLE-3 drafter: its shape, arithmetic, data, training and checkpoints."""
