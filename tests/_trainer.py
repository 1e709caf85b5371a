"""Training of a tiny model in sentence-transformers' Trainer."""

from _tiny import columns
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from transformers import TrainerCallback

import st_magnitude as stm


def make_trainer(
    model, loss, output, num_negatives=0, data=None, eval_data=None, evaluator=None, **options
):
    """Other options are training arguments."""
    defaults = {"max_steps": 8, "per_device_train_batch_size": 8, "learning_rate": 1e-3}
    defaults |= {"lr_scheduler_type": "constant", "save_strategy": "no", "seed": 3}
    defaults |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    of_trainer = {
        name: options.pop(name) for name in ("callbacks", "model_init") if name in options
    }
    args = SentenceTransformerTrainingArguments(str(output), **defaults | options)
    data = data or Dataset.from_dict(columns(num_negatives=num_negatives))
    return SentenceTransformerTrainer(
        model, args, data, eval_data, loss=loss, evaluator=evaluator, **of_trainer
    )


def train(*arguments, resume=None, **options):
    """The same, attached and trained."""
    trainer = make_trainer(*arguments, **options)
    trainer.add_callback(begins := Begins())
    stm.attach(trainer).train(resume_from_checkpoint=resume)
    assert begins.step == (int(resume.rpartition("-")[2]) if resume else 0)
    return trainer


class Begins(TrainerCallback):
    """The step at which training begins, by which a run that resumes is known."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step


def logged(trainer, key):
    """The values of a key in the log."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]
