"""Clauses of the summary: the subjects of the verdicts."""

from __future__ import annotations

CLAUSES = {
    "nuqsgd": {
        "variances are as expected": "variances below their bounds",
        "less variance than QSGD": "less variance than QSGD with the l2 norm",
        "variance is at most": "at most 1.1 times the variance of QSGD with the max norm",
        "mean loss is at most": "at most 1.1 times the mean loss of QSGD with the max norm",
        "converges faster": "faster convergence than QSGD with the l2 norm",
        "ends at a lower loss": "a lower final loss than QSGD with the l2 norm",
        "With learning rate": "mean losses near those of QSGD or below, with a larger learning rate",
    },
    "nuqsgd-gradients": {
        "bound on the variance": "a lower bound than QSGD with the l2 norm",
        "less variance than QSGD": "less variance than QSGD with the l2 norm",
        "With 4 bits NUQSGD's variance": "at most 1.1 times the variance of QSGD with the max norm with 4 bits",
        "without a zero": "less variance without a level at 0",
        "With 3 bits NUQSGD's variance": "at most 1.1 times the variance of QSGD with the max norm with 3 bits",
    },
    "nuqsgd-training": {
        "above the loss of QSGDinf": "within 1% of the loss of QSGD with the max norm",
        "lower loss than QSGD": "a lower loss than QSGD with the l2 norm",
        "default norm": "the l2 norm as good as the max norm",
    },
    "global-qsgd": {
        "every sum fits": "every sum fits its field",
        "fewer integers": "√n× fewer non-zero integers",
        "trains as well": "the float32 loss",
        "squared error is as expected": "squared errors below their bound",
        "√n× the range": "the range of sums",
        "costs no accuracy": "√n× fewer non-zero integers without a larger squared error",
        "saving in bytes": "savings that grow as √n at equal squared error",
        "needs fewer bits than the max norm": "fewer bits with the l2 norm than with the max norm",
    },
    "by-workers": {
        "grows with the number": "a saving of time that grows with the workers",
        "faster than float32": "faster than float32",
        "`advise`": "predictions of `advise` within 20%",
    },
    "rotated-sum": {
        "less than a tenth": "a tenth of the nmse without a rotation",
        "`advise` prints": "the nmse that `advise` prints",
        "one bucket of a million": "few overflows",
        "Provoked": "overflows are detected",
    },
    "qsgd": {
        "variance is as expected": "variances below their bound",
        "lengths proved": "lengths below those proved for Elias codes",
        "without their o(1)": "lengths below those of the paper without their o(1)",
        "fewer bits than codes of fixed width": "Elias codes shorter than a fixed width",
        "2.8 B + 32 bits: equal": "2.8 bits per element for equal magnitudes",
        "2.8 B + 32 bits": "2.8 bits per element for gradients and noise",
        "√B log B": "lengths that grow as √B log B",
    },
    "qsvrg": {
        "0.9^p": "linear convergence",
        "convergence of SVRG": "the epochs of SVRG",
        "An epoch of QSVRG": "the bits of an epoch",
        "fewer bits than": "fewer bits than other methods",
        "bounded delays": "convergence with late updates",
    },
    "binsgdm": {
        "After the same number of steps": "Adam's loss after the same number of steps",
        "After 2× the steps": "Adam's loss after 2× the steps",
        "steps per second": "more steps per second",
        "bytes of the formula": "the bytes of the hierarchical formula",
    },
    "binsgdm-tuning": {
        "ends within 1% of Adam's": "Adam's loss with the best setting, more steps or larger batches",
        "Larger batches": "larger batches help",
        "rounding by reducers": "the rounding by reducers costs a third",
    },
    "emulated": {
        "steps are at least": "the speed-ups of the papers",
        "hierarchical reduction": "a hierarchical reduction of BinSGDM faster than its flat one",
    },
    "eden": {
        "matches its formula": "the nmse of the formula",
        "smaller than that of QSGD": "a smaller nmse than QSGD for every distribution",
        "smaller than that of NUQSGD": "a smaller nmse than NUQSGD",
        "EDEN(bits=3, server_bits=3) ends within 0.5%": "EDEN(bits=3, server_bits=3) within 0.5% of float32",
        "ends within 0.5%": "EDEN(bits=3), and 3 bits with a trellis, within 0.5% of float32",
        "at most 2.1 bits": "2.1 bits on the reduce-scatter side within 1% of float32",
        "Whitened": "2 bits within 1% of float32, or 1 bit within 2%, by whitening",
        "With SGD with momentum": "the float32 loss with SGD",
        "Rows of zeros": "no harm to embeddings",
    },
    "limits": {
        "closes at least a quarter": "a trellis closes a quarter of the distance",
        "nmse of its formula": "the nmse of the formula",
    },
    "transformer": {"ends within 1%": "losses within 1% of float32"},
    "transformer-gpu": {"ends within 1%": "losses within 1% of float32"},
    "machines": {
        "one core, 119,000 parameters, 1 Gbit/s": "steps of the small model on one core at 1 Gbit/s",
        "takes less time": "steps faster than float32 with every recommended setting",
    },
    "bytes-count": {
        "Whole runs": "the product of steps and their time",
        "faster to within 1%": "the speed-up to the float32 loss",
    },
    "rivals": {
        "1-bit Adam ends within 1%": "Adam's loss with 1-bit Adam",
        "ends at a lower loss": "a lower loss with EDEN than with the rivals",
    },
    "more-workers": {
        "GlobalQSGD(bits=8) ends": "GlobalQSGD within 1% of float32",
        "rotate=True) ends": "GlobalQSGD with a rotation within 1%",
        "ends within 1%": "QSGD and EDEN within 1%",
    },
}
"""Parts of statements and their clauses, by claim. The first part that a statement has counts."""


def clause_of(claim: str, statement: str) -> str:
    """Return the clause of a verdict.

    Raises:
        LookupError: `CLAUSES` lacks the statement.
    """
    for part, clause in CLAUSES[claim].items():
        if part in statement:
            return clause
    raise LookupError(f"{claim}: add a part of this statement to CLAUSES: {statement}")
