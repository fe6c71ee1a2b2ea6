"""Lightning's trainer: how it is made of a configuration, how it is run, and its loggers."""

import logging
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy

from replug.cluster.gpu_shares import trains_on_gpu
from replug.cluster.gpus import num_gpus, torch_device
from replug.config.choices import Precision
from replug.config.errors import RunError
from replug.config.schema import Config
from replug.data.datamodule import StepDataModule
from replug.models.hardware import multiplies_bfloat16
from replug.train.module import LSRModule
from replug.train.ranks import COLLECTIVE_PATIENCE, RankEnvironment
from replug.train.run_dir import RunDirectory
from replug.train.step_metrics import JsonLinesLogger


def quieten_lightning() -> None:
    """Silence its banners and its advice against what is meant: eval mode without dropout, a sized iterable."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="(pytorch_lightning|lightning_fabric)")


def lightning_trainer(
    config: Config, folder: Path, callbacks: list[pl.Callback], loggers: list[Logger], environment: RankEnvironment
) -> pl.Trainer:
    train, ranks = config.train, environment.world_size()
    on_gpu = torch_device(trains_on_gpu(config, num_gpus() > 0)) == "cuda"
    strategy: str | DDPStrategy = "auto"
    if ranks > 1:
        strategy = _OwnStoreDDP(
            cluster_environment=environment,
            process_group_backend="nccl" if on_gpu else "gloo",
            timeout=COLLECTIVE_PATIENCE,
            broadcast_buffers=False,  # the encoder has none that training changes
        )
    return pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=[environment.device] if on_gpu else 1,
        num_nodes=ranks,
        strategy=strategy,
        precision="bf16-mixed" if uses_bf16(train.precision) else "32-true",
        max_steps=train.max_steps,
        max_epochs=1,
        accumulate_grad_batches=train.micro_batches,
        gradient_clip_val=train.gradient_clip,
        log_every_n_steps=1,
        logger=loggers or False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        # Under SLURM too one rank is a process of ours, not one that srun made.
        plugins=[] if ranks > 1 else [LightningEnvironment()],
        num_sanity_val_steps=0,
    )


class _OwnStoreDDP(DDPStrategy):
    """DDP whose ranks meet in the store of `ranks`, which listens on one address only."""

    def setup_distributed(self) -> None:
        """Join the process group, which Lightning then uses."""
        environment, device = self.cluster_environment, self.root_device
        assert isinstance(environment, RankEnvironment)
        if not dist.is_initialized():
            environment.join(
                self._get_process_group_backend(), COLLECTIVE_PATIENCE, device if device.type == "cuda" else None
            )
        super().setup_distributed()


def uses_bf16(precision: Precision) -> bool:
    """Return whether products are in bfloat16 on this hardware."""
    return precision is Precision.bf16_mixed or (precision is Precision.auto and multiplies_bfloat16())


def run_trainer(trainer: pl.Trainer, config: Config, module: LSRModule, checkpoint: Path | None) -> None:
    steps = StepDataModule(config.train.max_steps, config.train.micro_batches)
    trainer.fit(module, datamodule=steps, ckpt_path=checkpoint, weights_only=True)


def require_all_steps(trainer: pl.Trainer, config: Config) -> None:
    """Raise RunError where Lightning took the training for done before its last step."""
    if trainer.global_step != config.train.max_steps:
        raise RunError(
            f"training ended after step {trainer.global_step} of {config.train.max_steps} without an error; what is "
            "saved stays: run the same command again, or give another run_dir"
        )


def loggers_of(config: Config, run: RunDirectory) -> list[Logger]:
    """Return the loggers of a run: metrics.jsonl always, W&B if `wandb.mode` is not off."""
    loggers: list[Logger] = [JsonLinesLogger(run.metrics)]
    if config.wandb.mode.value != "off":
        from replug.train.wandb_logger import wandb_logger

        loggers.append(wandb_logger(config, run))
    return loggers


def publish(config: Config, loggers: list[Logger], run: RunDirectory, results: dict) -> None:
    """Send the table and the tuned retriever to W&B, if it is on."""
    if config.wandb.mode.value != "off":
        from replug.train.wandb_logger import publish_results

        publish_results(loggers, run, results)
