"""How the demo model is trained; ``scripts/train_demo_model.py`` puts the stages together."""
