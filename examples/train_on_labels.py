"""Train four kinds of models on one labelling, with sentence-transformers alone.

    replug.label("RETRIEVER", "LM", source="docs/", out="labels/mine").to_parquet("labels/mine.parquet")  # in Python
    python examples/train_on_labels.py labels/mine.parquet BASE OUT --steps 100

The LM has scored each query's candidates once. The four models are a bi-encoder, a cross-encoder (reranker), a sparse
encoder (SPLADE) and a multi-vector encoder (ColBERT). Each learns the LM's distribution over the candidates by a KL
divergence. BASE is an encoder; a head that it lacks begins at random.
"""

import argparse

import sentence_transformers as st
from datasets import Dataset
from sentence_transformers.cross_encoder.losses import ListNetLoss
from sentence_transformers.multi_vector_encoder.losses import MultiVectorDistillKLDivLoss
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss
from sentence_transformers.sparse_encoder.losses import SparseDistillKLDivLoss, SpladeLoss
from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer
from sentence_transformers.util import pairwise_cos_sim

GAMMA = 0.1  # loss.gamma: softmax(label / GAMMA) is the LM's distribution over the candidates
OTHERS = {"teacher_temperature": GAMMA, "student_temperature": 1.0}  # where scores are no cosines


def bi_encoder(base, labelled, **settings):
    model = st.SentenceTransformer(base)
    loss = DistillKLDivLoss(model, similarity_fct=pairwise_cos_sim, temperature=GAMMA)
    args = st.SentenceTransformerTrainingArguments(**settings)
    return st.SentenceTransformerTrainer(model, args, labelled, loss=loss)


def reranker(base, labelled, **settings):
    model = st.CrossEncoder(base, num_labels=1)
    passages = [name for name in labelled.column_names if name.startswith("passage_")]
    docs = [[row[name] for name in passages] for row in labelled]
    labels = [[score / GAMMA for score in row["label"]] for row in labelled]
    rows = Dataset.from_dict({"query": list(labelled["query"]), "docs": docs, "labels": labels})
    args = st.CrossEncoderTrainingArguments(**settings)
    return st.CrossEncoderTrainer(model, args, rows, loss=ListNetLoss(model))


def splade(base, labelled, **settings):
    transformer = Transformer(base, transformer_task="fill-mask")
    model = st.SparseEncoder(modules=[transformer, SpladePooling()])
    loss = SpladeLoss(model, SparseDistillKLDivLoss(model, **OTHERS), 3e-5, 5e-5)
    args = st.SparseEncoderTrainingArguments(**settings)
    return st.SparseEncoderTrainer(model, args, labelled, loss=loss)


def colbert(base, labelled, **settings):
    model = st.MultiVectorEncoder(base)
    loss = MultiVectorDistillKLDivLoss(model, **OTHERS)
    args = st.MultiVectorEncoderTrainingArguments(**settings)
    return st.MultiVectorEncoderTrainer(model, args, labelled, loss=loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", help="Parquet of the rows of replug.label")
    parser.add_argument("base", help="folder or hub name of an encoder")
    parser.add_argument("out", help="folder for the four models")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    labelled = Dataset.from_parquet(given.labels)
    for make in (bi_encoder, reranker, splade, colbert):
        folder = f"{given.out}/{make.__name__}"
        trainer = make(given.base, labelled, output_dir=f"{folder}/checkpoints", max_steps=given.steps)
        trainer.train()
        trainer.model.save_pretrained(folder)


if __name__ == "__main__":
    main()
