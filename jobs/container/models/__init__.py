"""Load pretrained models, fit them to the data, and BERT with a faster head."""
