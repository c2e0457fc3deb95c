"""Tune a language model with LoRA to answer like the examples, with GaudiTrainer on an HPU, else with Trainer.

    python train.py MODEL examples.jsonl          # lines with `messages`, or with `prompt` and `completion`
    python train.py --full MODEL examples.jsonl   # all weights; several ranks share them (FSDP2)
    python train.py --full MODEL texts.jsonl      # lines with `text`: continued pre-training

The lines with `trainyard` are for the platform. On a machine without the platform they have no effect, except that they
create `output` in the current folder. The lines with `jobs` need trainyard's package there, not only its library.
"""

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed

import trainyard
from jobs.container.versions import load_tokenizer, save_tokenizer
from jobs.core.errors import UsageError
from jobs.data_checks.conversations import Conversation, read_conversations

PLAIN_TEMPLATE = (  # for a tokenizer without a chat template; saved with the model
    "{% for message in messages %}{{ '### ' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### assistant\n' }}{% endif %}"
)

Example = tuple[list[int], list[int]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--full", action="store_true", help="train all weights instead of an adapter")
    parser.add_argument("--held-out", type=float, default=0.05, help="share of the examples to hold out for evaluation")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument(
        "--max-length", type=int, default=512, help="maximum tokens of a packed block and of an example"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="blocks per rank and step")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, help="default: 2e-4; with --full 2e-5")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64, help="length of the sample answers")
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def encoded(tokenizer: Any, talk: Conversation, max_length: int) -> Example:
    """Return the tokens and labels of a conversation. Only the assistant's answers and their end token have labels.

    A text is not truncated, and all its tokens have labels.
    """
    messages = talk.messages
    if talk.is_text:
        text = [*tokenizer(messages[0]["content"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        return text, text
    tokens, labels, done = [], [], ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number == 0:  # a greeting answers nothing
            continue
        try:
            asked = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
            answered = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False)
        except TemplateError as error:
            raise UsageError(
                f"line {talk.line} of the examples: the model's chat template rejects it: {error}"
            ) from None
        if not (asked.startswith(done) and answered.startswith(asked)):
            raise SystemExit("this chat template changes earlier turns; set a simpler template")
        for text, has_labels in ((asked[len(done) :], False), (answered[len(asked) :], True)):
            part = tokenizer(text, add_special_tokens=False).input_ids
            tokens += part
            labels += part if has_labels else [-100] * len(part)
        done = answered
    return tokens[:max_length], labels[:max_length]


def cut(examples: list[Example], max_length: int) -> list[Example]:
    """Join texts and cut them into blocks."""
    joined = [token for tokens, _ in examples for token in tokens]
    parts = [joined[place : place + max_length] for place in range(0, len(joined), max_length)]
    return [(part, part) for part in parts if len(part) > 1]


def packed(examples: list[Example], max_length: int) -> list[Example]:
    """Pack whole examples into blocks, to reduce padding."""
    blocks: list[Example] = []
    for tokens, labels in examples:
        if not blocks or len(blocks[-1][0]) + len(tokens) > max_length:
            blocks.append(([], []))
        blocks[-1][0].extend(tokens)
        blocks[-1][1].extend(labels)
    return blocks


def collate(rows: list[Example], padding: int, length: int | None) -> dict[str, torch.Tensor]:
    """Pad to `length`, or to the longest row."""
    longest = length or max(len(tokens) for tokens, _ in rows)
    filled = [(tokens, labels, longest - len(tokens)) for tokens, labels in rows]
    return {
        "input_ids": torch.tensor([tokens + [padding] * short for tokens, _, short in filled]),
        "attention_mask": torch.tensor([[1] * len(tokens) + [0] * short for tokens, _, short in filled]),
        "labels": torch.tensor([labels + [-100] * short for _, labels, short in filled]),
    }


def trainer_classes() -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """Return the Trainer class, its arguments class, and extra keyword arguments for the arguments and the Trainer."""
    try:
        from optimum.habana import GaudiConfig, GaudiTrainer, GaudiTrainingArguments
    except ImportError:
        from transformers import Trainer, TrainingArguments

        return Trainer, TrainingArguments, {"warmup_steps": 0.03}, {}
    config = GaudiConfig(use_fused_adam=True, use_fused_clip_norm=True, use_torch_autocast=True)
    # The transformers of Gaudi's releases has another name for a warm-up over a share of the steps.
    hpu = {"use_habana": True, "use_lazy_mode": True, "throughput_warmup_steps": 3, "warmup_ratio": 0.03}
    return GaudiTrainer, GaudiTrainingArguments, hpu, {"gaudi_config": config}


class MeasuresBaseLoss(TrainerCallback):
    """Evaluates the untuned model when the training begins. Each checkpoint contains the result."""

    def __init__(self, trainer: Any, seed: int) -> None:
        self.trainer, self.seed = trainer, seed

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if not any("base_loss" in entry for entry in state.log_history):
            self.trainer.evaluate(metric_key_prefix="base")
            set_seed(self.seed)


def prompt_of(tokenizer: Any, talk: Conversation) -> tuple[str, str]:
    """Return the model's prompt and a short form to print: a conversation up to the answer, or the start of a text."""
    messages = talk.messages
    if talk.is_text:
        begin = messages[0]["content"][:100]
        return begin, begin
    answers = (place for place, message in enumerate(messages) if place and message["role"] == "assistant")
    asked = messages[: next(answers)]
    return tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True), asked[-1]["content"]


def answer(model: Any, tokenizer: Any, text: str, new_tokens: int) -> str:
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
    prompt = prompt.to(model.device)
    tokens = model.generate(**prompt, max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return str(tokenizer.decode(tokens[0, prompt.input_ids.shape[1] :], skip_special_tokens=True))


def main() -> None:
    args = arguments()
    set_seed(args.seed)
    tokenizer = load_tokenizer(args.model)
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEMPLATE
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    talks, left_out = read_conversations(args.data)
    if left_out and os.environ.get("RANK", "0") == "0":
        print(f"warning: {left_out} conversations without an answer are left out", flush=True)
    order = torch.randperm(len(talks), generator=torch.Generator().manual_seed(args.seed)).tolist()
    count = min(max(1, round(len(talks) * args.held_out)), len(talks) - 1)
    held_out, trained = ([talks[place] for place in part] for part in (order[:count], order[count:]))
    rows = [[encoded(tokenizer, talk, args.max_length) for talk in part] for part in (held_out, trained)]
    # Examples that are truncated before the assistant's first answer have no labels.
    evaluated, examples = ([row for row in part if any(label >= 0 for label in row[1])] for part in rows)
    is_text = talks[0].is_text
    blocks = (cut if is_text else packed)(examples, args.max_length)
    evaluated = cut(evaluated, args.max_length) if is_text else evaluated
    if not (blocks and evaluated):
        raise UsageError(
            f"none of the {count if blocks else len(talks) - count} examples to {'hold out' if blocks else 'train on'} "
            f"has an answer within {args.max_length} tokens",
            next_step="raise --max-length, or add shorter examples",
        )

    trainer_class, arguments_class, device_arguments, trainer_arguments = trainer_classes()
    is_hpu, has_bf16 = bool(trainer_arguments), torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    model, found = AutoModelForCausalLM.from_pretrained(
        args.model,
        output_loading_info=True,
        trust_remote_code=False,
        torch_dtype=torch.bfloat16 if not args.full and (is_hpu or has_bf16) else torch.float32,
        **({"attn_implementation": "eager"} if is_hpu else {}),
    )
    if missing := sorted(found["missing_keys"]):  # transformers only warns
        raise SystemExit(f"{args.model}: {len(missing)} weights are missing from its files: {missing[0]}, …")
    model.config.use_cache = False
    if is_hpu:  # GaudiTrainer reads these from a Llama's configuration, but only Habana's versions of models have them
        for name in ("use_flash_attention", "flash_attention_recompute", "flash_attention_causal_mask"):
            setattr(model.generation_config, name, False)
        model.generation_config.attn_softmax_bf16 = False
    lora = LoraConfig(
        r=args.lora_rank, lora_alpha=2 * args.lora_rank, lora_dropout=0.05, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    if args.full and not is_hpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os.environ.update(FSDP_VERSION="2", FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT")  # for transformers 4
        sharding = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "sync_module_states": False}
        device_arguments |= {"fsdp": "full_shard auto_wrap", "fsdp_config": sharding}
    trainer = trainer_class(
        model=model if args.full else get_peft_model(model, lora),
        args=arguments_class(
            output_dir="checkpoints", num_train_epochs=args.epochs, max_steps=args.max_steps, seed=args.seed,
            per_device_train_batch_size=args.batch_size, per_device_eval_batch_size=args.batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            learning_rate=args.learning_rate or (2e-5 if args.full else 2e-4),
            lr_scheduler_type="cosine", logging_steps=10, save_strategy="no", report_to=[],
            remove_unused_columns=False, label_names=["labels"], bf16=is_hpu or has_bf16, disable_tqdm=True,
            use_cpu=not (is_hpu or torch.cuda.is_available()), **device_arguments,
        ),
        data_collator=lambda some: collate(some, tokenizer.pad_token_id, args.max_length if is_hpu else None),
        train_dataset=blocks,
        eval_dataset=evaluated,
        callbacks=[trainyard.Callback()],
        **trainer_arguments,
    )  # fmt: skip
    trainer.add_callback(MeasuresBaseLoss(trainer, args.seed))
    trainer.train(resume_from_checkpoint=trainyard.checkpoint())
    base_loss = next(entry["base_loss"] for entry in trainer.state.log_history if "base_loss" in entry)
    loss = trainer.evaluate()["eval_loss"]
    trainyard.result(base_eval_loss=base_loss, eval_loss=loss, training_examples=len(examples), blocks=len(blocks))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(trainer.model, options=whole) if args.full else None  # all ranks gather it
    if not args.full:
        trainer.save_model(str(trainyard.output() / "adapter"))
    if not trainer.is_world_process_zero():
        return
    folder = trainyard.output() / "model"
    if args.full:
        trainer.model.config.use_cache = True
        trainer.model.save_pretrained(folder, state_dict=state)
        base, tuned = (
            AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False).to(trainer.args.device)
            for path in (args.model, folder)
        )
    else:
        tuned = trainer.model.eval()
        tuned.config.use_cache = True
        # The Trainer's argument to save the tokenizer differs between releases.
        save_tokenizer(tokenizer, trainyard.output() / "adapter")
    prompts = [prompt_of(tokenizer, talk) for talk in held_out[:5]]
    with contextlib.nullcontext() if args.full else tuned.disable_adapter():
        before = [answer(base if args.full else tuned, tokenizer, text, args.new_tokens) for text, _ in prompts]
    after = [answer(tuned, tokenizer, text, args.new_tokens) for text, _ in prompts]
    with (trainyard.output() / "generations.jsonl").open("w", encoding="utf-8") as file:
        for number, ((_, shown), old, new) in enumerate(zip(prompts, before, after, strict=True)):
            file.write(json.dumps({"prompt": shown, "base": old, "tuned": new}, ensure_ascii=False) + "\n")
            if number < 3:
                print(f"prompt: {shown}\n  base:  {old}\n  tuned: {new}", flush=True)
    if not args.full:
        tuned.merge_and_unload().save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    print(f"held-out loss on {len(evaluated)} examples: base model {base_loss:.4f}, tuned {loss:.4f}")


if __name__ == "__main__":
    main()
