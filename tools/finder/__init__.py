"""How the built-in finder model is made: text, tokenizer, model, training, evaluation and export.

`tools/train_finder.py` is the command. Nothing in `hisparse` imports this package.
"""
