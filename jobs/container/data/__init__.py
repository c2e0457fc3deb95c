"""Everything between a job's inputs and its batches.

sources            inputs by their location: the hub, S3, local
tables             one reader of tables
artifacts          files that are made once and shared between runs
corpus_files       the documents of inputs, and the files of a corpus
tokenizer          train, load and run tokenizers
packed_tokens      a corpus packed into token ids; what a pretraining reads
masked_tokens      the masked sequences of a pretraining
labelled_text      examples with class numbers, from tables
labelled_tokens    their token ids, in batches of similar lengths; what a fine-tuning reads
predictions        metrics and reports of a classifier
"""
