"""How the demo models are trained; ``train_demo_model`` and ``train_demo_mmdit`` do it."""
