"""What a picture says, as text."""

from matplotlib.figure import Figure

EVERY_CHART = {
    "training_time_comparison.png",
    "training_throughput_comparison.png",
    "loss_vs_steps.png",
    "loss_vs_time.png",
    "memory_comparison.png",
    "step_time_distribution.png",
}


INFERENCE_CHART = "inference_performance_comparison.png"


def text_of(figure: Figure) -> str:
    """All that a reader can read on a figure, line breaks as spaces."""
    texts = [text.get_text() for text in figure.texts]
    texts += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    for axis in figure.axes:
        texts += [axis.get_title(loc="left"), axis.get_xlabel(), axis.get_ylabel()]
        texts += [text.get_text() for text in [*axis.texts, *axis.get_yticklabels()]]
        if legend := axis.get_legend():
            texts += [text.get_text() for text in legend.get_texts()]
    return " ".join(" ".join(texts).split())
