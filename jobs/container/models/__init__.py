"""Load pretrained models, fit their heads to the data, and train BERT with a faster head."""
