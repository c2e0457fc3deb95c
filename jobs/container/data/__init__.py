"""Read a job's inputs and turn them into batches.

sources            inputs by their location: the hub, S3, local
tables             one reader of tables
artifacts          files that are made once and shared between runs
corpus_files       read documents from inputs, and the files of a corpus
tokenizer          train, load and run tokenizers
packed_tokens      a corpus packed into token ids, the input of pre-training
masked_tokens      masked sequences for pre-training
labelled_text      examples with class numbers, from tables
labelled_tokens    their token ids in batches of similar lengths, the input of fine-tuning
predictions        metrics and reports of a classifier
"""
