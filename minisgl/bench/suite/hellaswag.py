"""HellaSwag: which of four endings goes on with a scene?  20 worked examples before each question.

    | 20 examples, ~700 tokens | scene 1 | ending A
                                         | ending B      two levels of sharing: the examples by all questions,
                                         | ending C      a question by its four endings
                                         | ending D
    | the same                 | scene 2 | ...

`select` scores the endings by their log-probabilities: four requests that sample nothing, in one batch behind a hint
for what they have in common.  A cache without tree structure finds neither level unless it is told where to look.

`--data FILE`: HellaSwag's own hellaswag_val.jsonl (or train), one object with ctx, endings and label a line.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import minisgl as sgl

from ..facts import pairs
from ..programs import BenchError, Programs, Setting, programs

SHOTS = 20

SCENES = pairs("""
    Anna puts two slices of bread into the toaster and waits. = The toast pops up, golden and crisp.;
    Tom ties his shoes and steps onto the running track. = He starts to run his first lap.;
    Mary pours flour, sugar and eggs into a bowl. = She stirs them into a smooth dough.;
    Jack opens his umbrella as he leaves the house. = The rain drums on the fabric above him.;
    Lucy strikes a match and holds it to the candle. = The wick catches and a small flame grows.;
    Peter throws a stick across the meadow. = The dog runs after it and brings it back.;
    Emma plugs the guitar into the amplifier. = She plays a loud chord.;
    Paul fills the kettle and puts it on the stove. = Soon the water boils and the kettle whistles.;
    Sarah climbs to the top of the diving board. = She takes a breath and jumps into the pool.;
    Mark turns the key and the engine starts. = He backs the car out of the garage.;
    Alice digs a small hole in the garden bed. = She lays a seed in it and covers it with soil.;
    David sits down in the chair at the barber's. = The barber cuts his hair short.;
    Julia puts a coin into the machine and presses a button. = A can of lemonade drops into the tray.;
    James casts his fishing line into the lake. = A trout bites and he reels it in.;
    Laura dips her brush into the blue paint. = She paints a wide sky on the canvas.;
    Henry blows up the last balloon. = He ties it with a string and hangs it on the wall.;
    The teacher writes a sum on the blackboard. = A pupil raises her hand to answer it.;
    The snow has covered the hill overnight. = Children carry their sledges to the top.;
    The goalkeeper watches the striker run up. = He dives to the left and catches the ball.;
    The waiter brings the menu to the table. = The guests choose soup and fish.;
    The nurse rolls up the patient's sleeve. = She measures his blood pressure.;
    The conductor raises his baton. = The orchestra begins to play.;
    The farmer leads the cow into the barn. = She milks it into a bucket.;
    The pilot speaks to the tower and gets permission. = The plane rolls down the runway and takes off.;
    The photographer asks the family to smile. = The shutter clicks.;
    The baker takes the tray out of the oven. = The smell of fresh rolls fills the shop.;
    The carpenter measures the plank and marks a line. = He saws along the line.;
    The postman stops at the letter box. = He pushes two letters through the slot.;
    The magician shows that his hat is empty. = Then he pulls a rabbit out of it.;
    The swimmer adjusts her goggles on the block. = At the whistle she dives in.;
    The tailor threads a needle. = He sews the missing button on the coat.;
    The boy counts to twenty with his eyes closed. = Then he goes to look for his hidden friends.;
    The girl lays the last piece into the puzzle. = The picture of the castle is complete.;
    The cat sees a mouse at the end of the hall. = It crouches and then leaps.;
    The baby begins to cry in the cot. = Her father lifts her up and rocks her.;
    The firemen stop in front of the burning house. = They unroll the hose and spray water.;
    The climbers reach the top of the mountain. = They rest and look down into the valley.;
    The referee looks at his watch. = He blows the whistle and the match is over.;
    The librarian stamps the book. = The student puts it into his bag.;
    The mechanic lifts the bonnet of the car. = She checks the oil.;
    The gardener switches on the sprinkler. = Water falls on the dry lawn.;
    The dentist asks the patient to open his mouth. = She looks at his teeth with a small mirror.;
    The cook chops an onion on the board. = His eyes fill with tears.;
    The audience waits in the dark theatre. = The curtain rises and the play begins.;
    The rider puts her foot into the stirrup. = She swings herself onto the horse.;
    The painter has finished the last wall. = He washes his rollers and closes the tin.;
    The clerk types the address into the computer. = The printer prints a label.;
    The children build a tower of wooden blocks. = It wobbles and falls down.
""")


@sgl.function
def hellaswag(s, examples, scene, endings):
    s += examples + "Scene: " + scene + "\nEnding:"
    s += sgl.select("ending", [" " + ending for ending in endings])
    return s["ending"]


@programs("hellaswag", "20-shot, select of 4 endings: shared examples, then a shared question", options=["data"])
def build(setting: Setting) -> Programs:
    rng = setting.rng(0)
    items = scenes(rng) if setting.data is None else read(setting.data)
    rng.shuffle(items)
    shots, asked = items[:SHOTS], items[SHOTS:]
    if not asked:
        raise BenchError(f"--data: hellaswag needs more than {SHOTS} rows, got {len(items)}")
    examples = "".join(f"Scene: {scene}\nEnding: {endings[right]}\n\n" for scene, endings, right in shots)
    asked = asked[: setting.count(gpu=200, cpu=16, quick=4)]
    calls = [{"examples": examples, "scene": scene, "endings": endings} for scene, endings, _ in asked]
    answers = [" " + endings[right] for _, endings, right in asked]
    return Programs(hellaswag, calls, lambda i, ending: ending == answers[i])


def scenes(rng: random.Random) -> list[tuple[str, list[str], int]]:
    """Each scene with its ending and three of others, several times over with other wrong ones."""
    found = []
    for _ in range(6):
        for scene, ending in SCENES:
            wrong = rng.sample([other for _, other in SCENES if other != ending], 3)
            endings = [ending, *wrong]
            rng.shuffle(endings)
            found.append((scene, endings, endings.index(ending)))
    return found


def read(path: Path) -> list[tuple[str, list[str], int]]:
    """Rows of HellaSwag's .jsonl.  Raises BenchError, naming the line, for anything else."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BenchError(f"--data: cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            found.append((row["ctx"], list(row["endings"]), int(row["label"])))
            if len(row["endings"]) != 4:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise BenchError(f"--data: {path}, line {number}: expected ctx, four endings and a label") from None
    return found
