"""How the demo models are trained; the ``train_demo_...`` scripts do it."""
