"""Tables of facts, written for this project: what the few-shot questions are made of.

A table is text, one `key = value` pair between semicolons, so that it can be read and corrected at a glance.
Every pair is common knowledge, and within one table a value answers its key and no other reading of the
question: that is what makes the other values of the same table wrong options.
"""

from __future__ import annotations


def pairs(table: str) -> list[tuple[str, str]]:
    """`"a = b; c = d"` -> `[("a", "b"), ("c", "d")]`, white space and line ends ignored."""
    entries = [entry.split("=") for entry in table.split(";") if entry.strip()]
    return [(" ".join(key.split()), " ".join(value.split())) for key, value in entries]


def groups(table: str) -> dict[str, list[str]]:
    """`"fruit = apple, pear; ..."` -> `{"fruit": ["apple", "pear"], ...}`."""
    return {key: items(values) for key, values in pairs(table)}


def items(table: str) -> list[str]:
    """`"a, b"` -> `["a", "b"]`."""
    return [item.strip() for item in table.split(",")]


CAPITALS = pairs("""
    France = Paris; Italy = Rome; Spain = Madrid; Germany = Berlin; Portugal = Lisbon; Greece = Athens;
    Austria = Vienna; Poland = Warsaw; Russia = Moscow; Ukraine = Kyiv; Hungary = Budapest;
    Ireland = Dublin; Norway = Oslo; Sweden = Stockholm; Finland = Helsinki; Denmark = Copenhagen;
    Iceland = Reykjavik; Belgium = Brussels; Romania = Bucharest; Bulgaria = Sofia; Serbia = Belgrade;
    Croatia = Zagreb; Turkey = Ankara; Egypt = Cairo; Kenya = Nairobi; Morocco = Rabat;
    Algeria = Algiers; Tunisia = Tunis; Libya = Tripoli; Ghana = Accra; Ethiopia = Addis Ababa;
    Senegal = Dakar; Uganda = Kampala; Zimbabwe = Harare; Angola = Luanda; Sudan = Khartoum;
    Japan = Tokyo; China = Beijing; India = New Delhi; Thailand = Bangkok; Vietnam = Hanoi;
    Iran = Tehran; Iraq = Baghdad; Syria = Damascus; Lebanon = Beirut; Jordan = Amman; Qatar = Doha;
    Nepal = Kathmandu; Pakistan = Islamabad; Afghanistan = Kabul; Bangladesh = Dhaka;
    South Korea = Seoul; Canada = Ottawa; Cuba = Havana; Peru = Lima; Chile = Santiago;
    Argentina = Buenos Aires; Colombia = Bogota; Venezuela = Caracas; Ecuador = Quito;
    Uruguay = Montevideo; Brazil = Brasilia; Australia = Canberra; New Zealand = Wellington;
    Jamaica = Kingston
""")

ELEMENTS = pairs("""
    hydrogen = H; helium = He; lithium = Li; beryllium = Be; boron = B; carbon = C; nitrogen = N;
    oxygen = O; fluorine = F; neon = Ne; sodium = Na; magnesium = Mg; aluminium = Al; silicon = Si;
    phosphorus = P; sulfur = S; chlorine = Cl; argon = Ar; potassium = K; calcium = Ca; scandium = Sc;
    titanium = Ti; vanadium = V; chromium = Cr; manganese = Mn; iron = Fe; cobalt = Co; nickel = Ni;
    copper = Cu; zinc = Zn; gallium = Ga; germanium = Ge; arsenic = As; selenium = Se; bromine = Br;
    krypton = Kr; rubidium = Rb; strontium = Sr; yttrium = Y; zirconium = Zr; niobium = Nb;
    molybdenum = Mo; palladium = Pd; silver = Ag; cadmium = Cd; indium = In; tin = Sn; antimony = Sb;
    iodine = I; xenon = Xe; barium = Ba; tungsten = W; platinum = Pt; gold = Au; mercury = Hg;
    thallium = Tl; lead = Pb; bismuth = Bi; radon = Rn; radium = Ra; uranium = U
""")

ANTONYMS = pairs("""
    hot = cold; big = small; tall = short; fast = slow; up = down; left = right; young = old;
    rich = poor; happy = sad; light = dark; early = late; full = empty; hard = soft; wet = dry;
    open = closed; high = low; strong = weak; clean = dirty; near = far; loud = quiet; thick = thin;
    wide = narrow; day = night; black = white; good = bad; true = false; win = lose; buy = sell;
    push = pull; give = take; love = hate; start = stop; first = last; inside = outside; above = below;
    before = after; always = never; more = less; north = south; east = west; war = peace; life = death;
    friend = enemy; question = answer; sweet = bitter; sharp = blunt; heavy = light; deep = shallow;
    safe = dangerous; cheap = expensive; same = different; rise = fall; arrive = leave;
    remember = forget; guilty = innocent; ancient = modern; brave = cowardly; easy = difficult;
    succeed = fail; increase = decrease; lend = borrow; maximum = minimum; polite = rude
""")

PLURALS = pairs("""
    child = children; man = men; woman = women; person = people; mouse = mice; tooth = teeth;
    foot = feet; goose = geese; leaf = leaves; knife = knives; wife = wives; life = lives; wolf = wolves;
    shelf = shelves; half = halves; loaf = loaves; thief = thieves; calf = calves; city = cities;
    baby = babies; lady = ladies; party = parties; story = stories; country = countries;
    family = families; berry = berries; fly = flies; box = boxes; bus = buses; dish = dishes;
    church = churches; class = classes; fox = foxes; glass = glasses; hero = heroes; potato = potatoes;
    tomato = tomatoes; echo = echoes; match = matches; watch = watches; brush = brushes; book = books;
    dog = dogs; cat = cats; tree = trees; house = houses; car = cars; bird = birds; table = tables;
    river = rivers; window = windows; key = keys; boy = boys; day = days; king = kings; army = armies;
    cherry = cherries; pony = ponies; witch = witches; beach = beaches
""")

PAST_TENSES = pairs("""
    go = went; eat = ate; see = saw; come = came; take = took; give = gave; write = wrote; run = ran;
    sing = sang; swim = swam; drink = drank; begin = began; break = broke; speak = spoke; drive = drove;
    ride = rode; fly = flew; grow = grew; know = knew; throw = threw; draw = drew; blow = blew;
    buy = bought; bring = brought; think = thought; teach = taught; catch = caught; fight = fought;
    find = found; feel = felt; keep = kept; sleep = slept; leave = left; lose = lost; meet = met;
    pay = paid; say = said; sell = sold; tell = told; send = sent; spend = spent; build = built;
    sit = sat; stand = stood; understand = understood; win = won; hold = held; hear = heard; make = made;
    do = did; have = had; become = became; choose = chose; fall = fell; forget = forgot; hide = hid;
    rise = rose; shake = shook; steal = stole; wake = woke; wear = wore
""")

ANIMALS = groups("""
    mammal = dog, cat, horse, cow, lion, tiger, elephant, whale, dolphin, rabbit, bear, monkey, sheep,
        pig, wolf;
    bird = eagle, sparrow, parrot, owl, penguin, duck, goose, swan, pigeon, robin, crow, hawk, turkey,
        stork;
    fish = salmon, trout, tuna, shark, cod, herring, carp, sardine, mackerel, pike, eel, goldfish;
    insect = ant, bee, butterfly, beetle, wasp, mosquito, cricket, grasshopper, ladybird, moth, termite,
        dragonfly;
    reptile = snake, lizard, crocodile, turtle, tortoise, alligator, iguana, gecko, chameleon, cobra,
        python
""")

QUANTITIES = pairs("""
    days in a week = seven; months in a year = twelve; legs of a spider = eight;
    sides of a triangle = three; sides of a square = four; wheels of a bicycle = two;
    wheels of a car = four; legs of a dog = four; legs of an ant = six; fingers on one hand = five;
    toes of two feet = ten; eyes of a person = two; hours in a day = twenty-four;
    minutes in an hour = sixty; seconds in a minute = sixty; centimetres in a metre = hundred;
    years in a century = hundred; years in a decade = ten; cents in a dollar = hundred;
    eggs in a dozen = twelve; faces of a cube = six; sides of a hexagon = six;
    sides of a pentagon = five; sides of an octagon = eight; wheels of a tricycle = three;
    letters in the alphabet = twenty-six; seasons in a year = four; colours in a rainbow = seven;
    hands of a person = two; noses of a person = one; wings of a bird = two; arms of an octopus = eight;
    planets in the solar system = eight; players in a football team = eleven; strings of a violin = four;
    strings of a guitar = six; holes on a golf course = eighteen; years in a millennium = thousand;
    metres in a kilometre = thousand; grams in a kilogram = thousand; letters in the word cat = three;
    letters in the word house = five; letters in the word at = two; quarters in a whole = four;
    halves in a whole = two; inches in a foot = twelve; feet in a yard = three; legs of a horse = four;
    legs of a chicken = two; suits in a deck of cards = four; singers in a trio = three;
    singers in a duet = two; wheels of a unicycle = one; sides of a rectangle = four;
    zeros in a million = six; horns of a unicorn = one; weeks in a fortnight = two; legs of a cat = four;
    ears of a rabbit = two; corners of a triangle = three
""")

SPANISH = pairs("""
    perro = dog; gato = cat; casa = house; agua = water; libro = book; mesa = table; amigo = friend;
    sol = sun; luna = moon; noche = night; rojo = red; azul = blue; verde = green; blanco = white;
    negro = black; uno = one; dos = two; tres = three; cinco = five; diez = ten; madre = mother;
    padre = father; hermano = brother; hermana = sister; hijo = son; mano = hand; ojo = eye;
    cabeza = head; pan = bread; leche = milk; queso = cheese; carne = meat; huevo = egg; manzana = apple;
    flor = flower; puerta = door; ventana = window; ciudad = city; calle = street; escuela = school;
    dinero = money; tiempo = time; hoy = today; grande = big; nuevo = new; viejo = old; bueno = good;
    malo = bad; feliz = happy; fuego = fire; tierra = earth; mar = sea; caballo = horse; vaca = cow;
    pescado = fish; rey = king; reina = queen; guerra = war; paz = peace; vida = life; muerte = death
""")

CONTINENTS = groups("""
    Europe = France, Germany, Spain, Italy, Poland, Sweden, Norway, Greece, Austria, Belgium, Portugal,
        Hungary, Ireland, Finland, Denmark, Romania, Bulgaria, Croatia;
    Asia = China, Japan, India, Thailand, Vietnam, Iran, Iraq, Nepal, Pakistan, Malaysia, Mongolia,
        South Korea, Afghanistan, Bangladesh, Cambodia, Laos, Myanmar, Sri Lanka;
    Africa = Egypt, Kenya, Nigeria, Ghana, Morocco, Ethiopia, Senegal, Uganda, Angola, Algeria, Tunisia,
        Libya, Zambia, Rwanda, Tanzania, Cameroon, Somalia, Botswana;
    South America = Brazil, Argentina, Chile, Peru, Colombia, Venezuela, Ecuador, Bolivia, Uruguay,
        Paraguay
""")

CATEGORIES = groups("""
    fruit = apple, banana, orange, grape, pear, peach, cherry, mango, strawberry, pineapple, plum, lemon;
    animal = dog, horse, cat, lion, sheep, monkey, rabbit, tiger, goat, wolf, camel, frog;
    colour = red, blue, green, yellow, purple, brown, white, black, pink, grey;
    vegetable = carrot, potato, onion, cabbage, spinach, broccoli, lettuce, garlic, celery, turnip;
    musical instrument = piano, guitar, violin, flute, trumpet, drum, harp, clarinet, cello, saxophone;
    piece of furniture = table, chair, sofa, desk, bed, wardrobe, bookcase, bench, couch, stool;
    piece of clothing = shirt, trousers, coat, skirt, sweater, hat, jacket, dress, socks, scarf;
    part of the body = arm, leg, hand, nose, mouth, knee, elbow, shoulder, ear, neck;
    vehicle = car, bus, train, truck, bicycle, boat, airplane, tractor, motorcycle, helicopter;
    tool = hammer, screwdriver, saw, drill, wrench, pliers, shovel, rake, axe, chisel;
    sport = football, tennis, basketball, hockey, golf, rugby, baseball, volleyball, cricket, badminton;
    profession = doctor, teacher, lawyer, farmer, baker, nurse, engineer, plumber, carpenter, dentist
""")

NUMBERS = items("""
    zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen,
    fifteen, sixteen, seventeen, eighteen, nineteen, twenty
""")
NAMES = items("""
    Anna, Tom, Mary, Jack, Lucy, Peter, Emma, Paul, Sarah, Mark, Alice, David, Julia, James, Laura, Henry
""")
PLACES = items("""
    kitchen, garden, school, library, park, office, station, hospital, church, market, museum, bakery
""")
THINGS = items("book, ball, key, phone, hat, letter, camera, apple, bag, lamp, umbrella, pencil")
