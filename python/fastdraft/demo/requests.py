"""The demo's requests: what people ask for every day, from nearly all copying to none at all.

So small a model does not follow an instruction to edit by itself. Where an answer must have a form,
its first line is given, as an editor with the cursor behind that line would.
"""

from __future__ import annotations

import colorsys
import inspect
from dataclasses import dataclass

__all__ = ["Request", "demo_requests"]


@dataclass(frozen=True)
class Request:
    """One thing to ask the model.

    Attributes:
        name: A short handle.
        title: What the request is, for people.
        prompt: What the user says.
        answer_start: How the answer begins; given to the model, not generated.
        prediction: Text expected in the answer, or `None`.
    """

    name: str
    title: str
    prompt: str
    answer_start: str = ""
    prediction: str | None = None


def demo_requests() -> list[Request]:
    """The five requests, in the order in which they are shown."""
    # A real source file that every Python has and may read, and that has hardly changed in decades.
    old = "\n".join(inspect.getsource(f) for f in (colorsys.rgb_to_yiq, colorsys.yiq_to_rgb))
    return [
        Request(
            name="edit",
            title="Rewrite a source file, with the old file as prediction",
            prompt="Rename yiq to luma. Answer with the whole new file only.\n\n"
            f"```python\n{old}```",
            answer_start="```python\ndef rgb_to_luma(r, g, b):",
            prediction=old,
        ),
        Request(name="correct", title="Correct a text", prompt=_CORRECT),
        Request(
            name="list",
            title="Turn log lines into a list",
            prompt=_LOG,
            answer_start="* 2031-03-04 07:58:12 gateway: started on port 8443 with 4 workers",
        ),
        Request(name="document", title="Answer from a document", prompt=_DOCUMENT),
        Request(
            name="story",
            title="Tell a story (nothing to copy)",
            prompt="Write a short story about a clockmaker who finds a letter inside an old clock.",
        ),
    ]


_CORRECT = """\
Correct the spelling and grammar of this text. Answer with the corrected text only.

Dear neighbours,

last weekend we has met in the garden behind the house to talk about the new bicycle shed. Most \
of us was agree that the old shed is to small and that the roof are leaking since the storm in \
october. Mr. Lindqvist have offered to draw a plan, and his brother, who is a carpenter, will \
helps us to choose the wood. We still needs somebody which asks the city for a permission, \
because without it we can not begin to build before the winter. If you has time on Tuesday \
evening, please comes to the kitchen on the ground floor."""

_LOG = """\
Rewrite this log as a Markdown list.

2031-03-04 07:58:12 INFO  gateway  started on port 8443 with 4 workers
2031-03-04 07:58:14 INFO  orders   connected to database orders_main
2031-03-04 07:58:15 WARN  orders   migration 0042 is pending, running it now
2031-03-04 07:58:31 INFO  orders   migration 0042 finished after 16 seconds
2031-03-04 08:02:07 ERROR payments certificate of bank.example expires in 3 days
2031-03-04 08:05:40 WARN  gateway  request took 2310 ms, limit is 2000 ms
2031-03-04 08:06:02 INFO  payments retry queue is empty"""

_DOCUMENT = """\
Answer the question from the document, in full sentences and with the document's own words where \
you can.

Document:
The lighthouse on Tern Rock was built between 1871 and 1874 from granite that was cut on the \
mainland and brought over by barge. Its first lamp burned colza oil and could be seen for \
fourteen nautical miles. In 1903 the oil lamp was replaced by an incandescent vapour burner, and \
in 1958 the tower was connected to the mainland by an undersea cable and the light was made \
electric. The last keeper, Agnes Moore, left the rock in 1986, when the light was made \
automatic. Since 1994 the tower has belonged to a society of volunteers, who repaint it every \
fourth summer and open it to visitors on the first Sunday of each month from May to September.

Question: How has the lamp of the lighthouse changed over the years, and who looks after the \
tower today?"""
