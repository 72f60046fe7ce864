"""Verses for the `sonnet` dataset: lines of ordinary English, so that prompts resemble text."""

_TEXT = """
The morning lays its silver on the bay,
And gulls go wheeling where the nets are drawn;
A boy has dragged his father's boat away
To meet the tide that carries off the dawn.
He knows the channel as he knows his name,
The buoy that rings, the rock that makes no sound;
No two of all his crossings were the same,
Yet every one has brought him safe aground.
What is a harbour but a door left wide,
A lamp that someone lights and does not leave?
The sea forgives the sailor all his pride
And keeps of what he offers what we grieve.
So let him go, and let the wind be fair:
Who waits on shore has also work and care.

The clerk who counts the hours of the town
Has wound the clock for seven and thirty years;
He climbs the stair at dusk, and coming down
He oils the wheels and listens to the gears.
A minute is a small thing in his hand,
A brass and patient creature, round and slow;
He cannot make the running river stand,
But he can tell the river when to go.
The bakers bless him, and the lovers curse,
The trains depart according to his bell;
No wealth of kings was ever in his purse,
Yet time was his to measure and to sell.
When he is gone, and other hands shall wind,
The hour will strike, and no one change his mind.

I planted beans along the southern wall
And gave them string to climb and wood to hold;
The summer came and made them twice as tall,
The autumn turned their narrow leaves to gold.
My neighbour planted nothing but a chair,
And sat all season reading in the shade;
He said the beans were handsome over there,
And praised the tidy rows that I had made.
In time the frost came down upon us both,
On gardener and reader, weed and vine;
I gave him half my harvest, nothing loath,
He lent me books, and sometimes lent me wine.
Now when the snow lies even on the ground
I read of summers, and he walks around.

A bridge of stone remembers every cart,
The iron wheel, the hoof, the naked feet;
The mason carved three letters and a heart
Beneath the arch, where dark and water meet.
The flood of ninety took the mill away,
The flood of seven took the lower town;
The bridge stood in the middle of the bay
And watched the chimneys and the trees go down.
What holds it up is only weight on weight,
Each stone that leans upon its leaning brother;
No mortar made by man could be so great
As falling things that stop and hold each other.
We cross it now with engines and with light,
And trust the dead who set the keystone right.
"""

LINES = [line for line in _TEXT.splitlines() if line]
