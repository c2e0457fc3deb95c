"""From inputs to batches.

sources, tables                 inputs by their location; one reader of tables
artifacts                       what is made once and shared: built shard by shard, opened, verified
corpus_documents, _files,       documents out of inputs, the files of a corpus, and its packing into token ids
    _packing
vocabulary, encoders            a tokenizer learnt, and text to ids
packed_tokens, masked_tokens    what a pre-training reads
labelled_text, _tokens,         what a fine-tuning reads: examples, their ids, batches of like lengths
    _buckets
"""
