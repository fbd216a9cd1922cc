"""Hugging Face's Trainer around LlamaForCausalLM: its own training loop, `Trainer.train`, with our batches.

The loop runs in its own thread: its data loader waits until `step` provides the next batch; a callback reports the end of the
optimizer step. So the time includes everything in a user's step except reading data and logging.
"""

import queue
import threading
import warnings
from collections.abc import Callable, Iterator

import torch
import transformers
from torch import Tensor

from benchmarks.contestants.job import Job, load

_FOREVER = 1_000_000  # steps


class _Feed:
    """A data loader that yields the batches of its queue."""

    def __init__(self) -> None:
        self.batches: queue.SimpleQueue[dict[str, Tensor]] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield self.batches.get()


class _StepEnd(transformers.TrainerCallback):
    def __init__(self, done: queue.SimpleQueue):
        self.done = done

    def on_step_end(self, *_, **__) -> None:
        self.done.put(None)


class _Trainer(transformers.Trainer):
    def __init__(self, feed: _Feed, **arguments):
        super().__init__(**arguments)
        self.feed = feed
        self.loss = 0.0  # of the step, on the device

    def get_train_dataloader(self) -> _Feed:
        return self.feed

    def training_step(self, *arguments, **named) -> Tensor:
        loss = super().training_step(*arguments, **named)
        self.loss = self.loss + loss
        return loss


def build(job: Job) -> Callable[[Tensor], Tensor]:
    amp = job.amp
    # no KV cache, which is for generation and causes a warning with recomputation
    config = transformers.LlamaConfig.from_pretrained(job.folder, use_cache=False)
    with torch.device(job.device):  # a GPU computes initial values, which `load` replaces, quickly
        model = transformers.LlamaForCausalLM._from_config(config, dtype=job.dtype, attn_implementation="sdpa")
    load(model, job.weights())
    arguments = transformers.TrainingArguments(
        output_dir=f"{job.folder}/trainer",
        max_steps=_FOREVER,
        per_device_train_batch_size=job.batch,
        gradient_accumulation_steps=job.accumulate,
        gradient_checkpointing=job.recompute == "full",
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=amp is not None,
        use_cpu=job.device == "cpu",
        torch_compile=job.compiled,
        optim="adamw_torch_fused",
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        weight_decay=job.weight_decay,
        adam_beta1=job.beta1,
        adam_beta2=job.beta2,
        adam_epsilon=job.eps,
        max_grad_norm=job.max_norm,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    feed, done = _Feed(), queue.SimpleQueue()
    trainer = _Trainer(feed, model=model, args=arguments, callbacks=[_StepEnd(done)])
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)

    def train() -> None:
        try:
            trainer.train()
        except BaseException as error:  # `step` waits for it and raises it
            done.put(error)

    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    loop = threading.Thread(target=train, daemon=True, name="Trainer.train")

    def step(tokens: Tensor) -> Tensor:
        trainer.loss = 0.0
        for part in tokens:
            # `shift_labels` are the labels; without them, a model shifts `labels` itself and has one label less than tokens
            feed.batches.put({"input_ids": part[:, :-1], "labels": part[:, :-1], "shift_labels": part[:, 1:].contiguous()})
        if not loop.is_alive():
            loop.start()
        if (error := done.get()) is not None:
            raise error
        return trainer.loss

    return step
