"""Training of a tiny model in sentence-transformers' Trainer."""

from _tiny import columns
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from transformers import TrainerCallback

import st_magnitude as stm


def train(
    model,
    loss,
    output,
    num_negatives=0,
    data=None,
    eval_data=None,
    resume=None,
    callbacks=(),
    **options,
):
    """Through the Trainer; returns it."""
    defaults = {"max_steps": 8, "per_device_train_batch_size": 8, "learning_rate": 1e-3}
    defaults |= {"lr_scheduler_type": "constant", "save_strategy": "no", "seed": 3}
    defaults |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    args = SentenceTransformerTrainingArguments(str(output), **defaults | options)
    data = data or Dataset.from_dict(columns(num_negatives=num_negatives))
    trainer = SentenceTransformerTrainer(
        model, args, data, eval_data, loss=loss, callbacks=[begins := Begins(), *callbacks]
    )
    stm.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    assert begins.step == (int(resume.rpartition("-")[2]) if resume else 0)
    return trainer


class Begins(TrainerCallback):
    """The step at which training begins, by which a run that resumes is known."""

    step: int

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step


def logged(trainer, key):
    """The values of a key in the log."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]
