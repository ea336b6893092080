"""Data, models and one training loop: what the command line runs and what the tables come from.

Everything that needs more than torch (scikit-learn, rich, matplotlib, tensorboard) is imported
in here and in `soframe.cli`, never by `soframe` itself.
"""
