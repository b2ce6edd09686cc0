"""In: docstrings as they are read for the site. Out: the same, their `Example:`
sections under the name that griffe's parser of docstrings knows.
"""

import griffe


class ExampleSections(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            lines = obj.docstring.value.split("\n")
            obj.docstring.value = "\n".join(
                "Examples:" if line == "Example:" else line for line in lines
            )
