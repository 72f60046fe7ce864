"""Prompts for the training data, made from templates over topics, and prompts on which acceptance is measured.

No training prompt equals a held-out prompt. The model itself samples further training prompts (see ``answers``).
"""

from __future__ import annotations

import random

Message = dict[str, str]

_TOPICS = (
    "bread", "volcanoes", "chess", "the French Revolution", "photosynthesis", "bicycles", "the moon", "jazz", "honey",
    "medieval castles", "electric cars", "glaciers", "the human heart", "coffee", "ancient Egypt", "robots", "owls",
    "the Amazon river", "football", "gravity", "pottery", "the Internet", "earthquakes", "Shakespeare", "cheese",
    "deep sea fish", "solar panels", "the Great Wall of China", "yoga", "dinosaurs", "magnets", "rice", "lighthouses",
    "vaccines", "trains", "the periodic table", "cats", "the Renaissance", "spices", "satellites", "mushrooms",
    "marathon running", "bridges", "the Olympic Games", "bees", "probability", "opera", "recycling", "penguins",
    "the steam engine",
)  # fmt: skip

# Tasks with one topic each.
_TASKS = (
    "What is the most important fact about {}?",
    "Explain {} to a ten-year-old child.",
    "Write a short story about {}.",
    "Give me five facts about {}, as a numbered list.",
    "Write a poem of four lines about {}.",
    "What are the advantages and disadvantages of {}?",
    "Summarize the history of {} in three sentences.",
    "Write three quiz questions about {} and their answers.",
    "Describe {} in one paragraph for an encyclopedia.",
    "I have to give a talk about {}. Suggest an outline.",
    "Return a JSON object with the keys title, summary and tags for an article about {}.",
    "Write an email to a friend in which you recommend a book about {}.",
    "Write a dialogue between a teacher and a student about {}.",
    "List ten words that have to do with {}, separated by commas.",
    "What would the world be like without {}?",
    "Make a Markdown table with three rows about {}.",
    "Which common misconceptions are there about {}?",
    "Write a product review of a book about {}.",
    "Translate into French: I have always been interested in {}.",
    "Translate into Spanish: My sister knows everything about {}.",
    "How has {} changed in the last hundred years?",
    "Write a news headline and a first paragraph about {}.",
    "Compare {} with something that is very different.",
    "Give step-by-step advice to someone who wants to learn about {}.",
)

_CODE_TASKS = (
    "Write a Python function that {}.",
    "Write a JavaScript function that {}.",
    "Write a C function that {}, with comments.",
    "Write a Python class with a method that {}.",
    "Explain how a program that {} works, then show it in Python.",
)
_CODE_TOPICS = (
    "reverses a string", "counts the vowels of a text", "sorts a list of numbers", "computes a factorial",
    "finds the largest number in a list", "checks whether a number is prime", "removes duplicates from a list",
    "reads a CSV file", "converts Celsius to Fahrenheit", "merges two dictionaries", "computes the n-th Fibonacci term",
    "checks whether a word is a palindrome", "counts how often each word occurs", "rolls two dice",
    "computes the average of a list", "validates an email address", "searches a sorted list", "prints a row of stars",
)  # fmt: skip

_PASSAGES = (
    "The town council decided on Monday to close the old bridge for repairs. Work begins in March and lasts six weeks. "
    "Drivers have to use the tunnel in the north, and buses stop at the market square instead.",
    "Tea plants grow best in warm and humid places with acid soil. The leaves are picked by hand, withered, rolled "
    "and dried. Green tea is heated soon after the harvest, while black tea oxidizes for some hours.",
    "Our new printer prints forty pages per minute and needs less power than the old one. Some employees said that it "
    "is too loud. The manager therefore wants to move it into the hallway next week.",
    "The young astronomer looked at the same star every night for a year. In spring its light grew weaker every nine "
    "days. She concluded that a planet must pass in front of it, and wrote to the observatory.",
)
_PASSAGE_TASKS = (
    "Summarize this text in one sentence:\n\n{}",
    "Which three facts does this text mention? Answer as a list.\n\n{}",
    "Rewrite this text in simpler words:\n\n{}",
    "Give this text a title and explain your choice:\n\n{}",
    "Continue this text with one more paragraph:\n\n{}",
)

_FOLLOW_UPS = (
    ("Tell me something about {}.", "Of course! What would you like to know about {}?", "Start with the basics."),
    ("Do you like {}?", "I am a language model, but many people like {}.", "Why do they? Give me three reasons."),
    ("I want to write about {}.", "That is a good subject. Which form do you have in mind?", "A letter to a museum."),
    ("What is {}?", "That is a large subject. Shall I give you a short answer?", "Yes, in two sentences, please."),
)


def training_prompts(seed: int) -> list[list[Message]]:
    """Return conversations that end with a user's turn, from all templates, in a random order."""
    numbers = random.Random(seed)
    texts = [task.format(topic) for task in _TASKS for topic in _TOPICS]
    texts += [task.format(topic) for task in _CODE_TASKS for topic in _CODE_TOPICS]
    texts += [task.format(passage) for task in _PASSAGE_TASKS for passage in _PASSAGES]
    texts += [_sum_of(numbers) for _ in range(100)]
    held_out = set(HELD_OUT)
    prompts = [[_user(text)] for text in texts if text not in held_out]
    for first, answer, second in _FOLLOW_UPS:
        for topic in _TOPICS:
            answered = {"role": "assistant", "content": answer.format(topic)}
            prompts.append([_user(first.format(topic)), answered, _user(second)])
    numbers.shuffle(prompts)
    return prompts


def held_out_prompts() -> list[list[Message]]:
    """Return the conversations of :data:`HELD_OUT`."""
    return [[_user(text)] for text in HELD_OUT]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _sum_of(numbers: random.Random) -> str:
    a, b = numbers.randint(2, 99), numbers.randint(2, 99)
    operation = numbers.choice(("plus", "minus", "times"))
    return numbers.choice(
        (
            f"What is {a} {operation} {b}?",
            f"Compute {a} {operation} {b} and show each step.",
            f"Anna has {a} apples and Ben has {b}. How many do they have together?",
            f"A train drives {a} kilometers per hour for {b} hours. How far does it get?",
        )
    )


# Prompts on which acceptance is measured. Equal prompts are removed from the training prompts.
HELD_OUT = (
    # questions
    "What is the capital of Portugal, and what is it known for?",
    "Why is the sky blue during the day and red at sunset?",
    "How does a refrigerator keep food cold?",
    "Who painted the Mona Lisa and when?",
    "What happens to water when it freezes?",
    "Why do leaves change their color in autumn?",
    "What is the difference between a virus and a bacterium?",
    "How do airplanes stay in the air?",
    # code
    "Write a Python function that returns the second largest element of a list.",
    "Write a SQL query that lists all customers who ordered something in May.",
    "Write a shell command that finds all files larger than 100 megabytes.",
    "Write an HTML page with a heading, a paragraph and a button.",
    "Explain what a recursive function is, with an example in Python.",
    "Write a Python script that downloads a web page and prints its title.",
    "What does this code do? for i in range(10): print(i * i)",
    "Write a unit test for a function that adds two numbers.",
    # lists and tables
    "List seven things to pack for a camping trip.",
    "Name the planets of the solar system in order.",
    "Give me a list of healthy breakfasts with one sentence each.",
    "Make a weekly plan for someone who wants to get fit.",
    "List three European countries, their capitals and their languages.",
    "What are the steps to change a flat tire?",
    # stories and other creative texts
    "Write a story about a lost umbrella that finds its way home.",
    "Write a haiku about the first snow.",
    "Write a fairy tale with a clever fox and a proud king.",
    "Write the first paragraph of a detective novel set in Venice.",
    "Write a thank-you letter to a neighbor who watered my plants.",
    "Invent a name and a slogan for a new brand of shoes.",
    # translations and rewriting
    "Translate into German: The train to Berlin leaves at half past nine.",
    "Translate into French: Where can I buy a ticket for the museum?",
    "Translate into Italian: We would like a table for four people.",
    "Rewrite this sentence politely: Give me the report now.",
    "Correct the mistakes in this sentence: She don't has no time for go shopping.",
    "Put this sentence into the passive voice: The dog chased the cat through the garden.",
    # JSON and structured answers
    "Return a JSON object that describes a person with name, age and hobbies.",
    "Return a JSON array with the four seasons and a typical activity for each.",
    "Extract the date and the place as JSON: The concert is on June 3 in Vienna.",
    "Is this review positive or negative? Answer with one word: The food was cold and the waiter was rude.",
    # summaries
    "Summarize in two sentences: Bats are the only mammals that can fly. Most of them hunt insects at night. They find "
    "their way by sending out high sounds and listening to the echo. Many species sleep in caves during the day.",
    "Write three key points: The company grew by ten percent last year. It opened two offices in Asia and hired ninety "
    "engineers. Next year it wants to reduce its emissions by half.",
    # arithmetic and reasoning
    "What is 17 times 6? Explain how you computed it.",
    "If a shirt costs 40 dollars and is reduced by 25 percent, what does it cost?",
    "Tom is older than Lisa, and Lisa is older than Max. Who is the youngest?",
    "How many minutes are there in three and a half hours?",
    # advice and opinions
    "How can I fall asleep faster in the evening?",
    "Give me advice for a job interview at a bank.",
    "Should students wear school uniforms? Give arguments for both sides.",
    "How do I politely decline an invitation to a wedding?",
)
