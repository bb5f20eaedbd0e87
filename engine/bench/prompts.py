"""What every contender continues."""

PROMPTS = (
    "Once upon a time, there was a little girl named Lily who",
    "Tom had a red kite.",
    "The little frog was",
    "One day, a boy named Ben went to the park with his mom.",
)

#: Other beginnings, for batches.
MORE = (
    "The old man walked down to the river because",
    "In the morning, Anna opened the window and saw",
    "How to bake bread at home: first",
    "The history of the city begins with",
    "My favourite season is autumn, and",
    "When the teacher asked the class about the moon,",
    "Water is important for plants because",
    "The captain looked at the map and said",
    "A good friend is someone who",
    "There are three things that every garden needs:",
    "The train was late again, so the two brothers",
    "Computers are machines that",
)


def many_prompts(count: int) -> list[str]:
    """`count` prompts; beyond sixteen the same ones again, each with its number in front."""
    different = [*PROMPTS, *MORE]
    turns = range(-(-count // len(different)))
    return [text if not turn else f"{turn + 1}. {text}" for turn in turns for text in different][:count]
