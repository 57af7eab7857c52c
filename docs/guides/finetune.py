"""Fine-tune a causal language model on a text, with transformers' Trainer and the loss of onchip.

    python docs/guides/finetune.py MODEL TEXT_FILE OUT_FOLDER [STEPS]

MODEL is a name on the Hugging Face Hub or a folder.  Paragraphs of the text are packed into sequences of one length.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from onchip.integrations.transformers import patch

LENGTH = 64  # tokens of a sequence


def packed(text, tokenizer):
    """Sequences of LENGTH tokens: the paragraphs one after the other, with an end of text behind each."""
    paragraphs = [p for p in text.split("\n\n") if p.strip()]
    ids = [i for p in paragraphs for i in [*tokenizer(p)["input_ids"], tokenizer.eos_token_id]]
    rows = [ids[at : at + LENGTH] for at in range(0, len(ids) - LENGTH + 1, LENGTH)]
    # The labels are the ids as they are: the model shifts them.
    return Dataset.from_dict({"input_ids": rows, "labels": rows}).with_format("torch")


def main(name, text, out, steps=20):
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)
    report = patch(model)  # the one line of onchip's
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=int(steps),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        bf16=torch.cuda.is_available(),
        logging_steps=5,
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=packed(Path(text).read_text(), tokenizer))
    trainer.train()
    trainer.save_model(out)
    tokenizer.save_pretrained(out)
    print(report)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main(*sys.argv[1:])
