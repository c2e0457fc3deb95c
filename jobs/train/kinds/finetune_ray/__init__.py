"""finetune-ray: the fine-tuning of finetune-classification, its ranks started by Ray Train."""
