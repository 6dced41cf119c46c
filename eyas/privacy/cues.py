"""Words that tell what stands beside them: titles, kinds of streets, prepositions, words for names
and addresses.

Knows words in the languages whose names and addresses are sought, folded as the gazetteer folds
them. Knows no sentences.
"""

from __future__ import annotations

import re

_KINDS = {
    "street": """street st avenue ave av road rd boulevard blvd lane ln drive court ct terrace parkway pkwy highway hwy crescent
        close grove gardens mews row walk alley trail circle cir plaza square sq way turnpike loop rue chemin allee quai impasse
        route cours calle avenida avda paseo carrera cra callejon camino rua travessa alameda estrada praca largo via viale
        piazza piazzale corso vicolo strasse str gasse platz weg straat laan plein ulica ul
        ulice namesti trida utca ut ter korut
        katu tie gata gatan vagen vej gade cesta iela gatve tanav sokak cadde caddesi mahallesi mah jalan jl strada bulevardul
        aleja aleje osiedle prospekt ulitsa pereulok plac""",
    "unit": """apt apartment suite ste unit flat floor fl room rm bldg building lot piso apto appt apartamento etage batiment
        nr lgh""",
    "box": "box p.o po postfach bp apartado postbus postboks pobox caixa",
    "postcode": "zip zipcode postcode postal plz cep cap pin eircode",
    "address": "address addresses shipping ship shipped deliver delivered delivery billing mailing "
    "residence located location",
    "name": "name named surname nickname lastname firstname names alias aka née nee",
    "title": """mr mrs ms miss mx dr prof professor sir madam dame lord lady herr frau mme mlle monsieur madame senor senora sr
        sra don dona doctor judge captain president king queen prince princess pope saint father sister rev reverend senator
        governor mayor officer detective sergeant general colonel major minister chancellor coach director actor actress author
        singer""",
    "greet": "hi hello hey dear thanks thank regards sincerely cheers love best yours attn bonjour "
    "hola hallo liebe lieber",
    "kin": """wife husband brother mother father son daughter uncle aunt cousin grandma grandpa boyfriend girlfriend friend
        friends colleague colleagues boss manager neighbor neighbour roommate partner mom mum dad nephew niece teacher""",
    "call": "call called calling meet met contact ask asked tell told invite emailed texted wrote "
    "written by said says",
    "and": "with and plus",
    "in": "in at to from near around toward towards via across outside inside visit visiting "
    "visited leaving",
    "live": "live lives lived living born moved moving resident residing based travel traveling "
    "travelling trip flight fly",
    "of": "of for the a an",
    "is": "is was am i'm im are this it's",
    "month": """january february march april may june july august september october november december jan feb mar apr jun jul
        aug sep sept oct nov dec monday tuesday wednesday thursday friday saturday sunday mon tue wed thu fri sat sun today
        tomorrow christmas easter""",
    "company": """inc ltd llc corp corporation company co gmbh sa plc ag group bank university college school institute hospital
        holdings partners industries airlines hotel restaurant cafe museum club association society foundation committee
        agency orchestra records studios systems solutions technologies labs software""",
    "direction": "north south east west northern southern eastern western central upper lower n s "
    "e w ne nw se sw",
    "part": "de da di del della des du van von der den la le el al bin ibn abu ten ter zu dos das "
    "do y e mac san santa",
    "place": """city town village county state province country district region republic island islands lake mount mountain
        river bay beach valley park airport station port cape coast hill hills""",
    "junior": "jr junior ii iii iv phd md esq",
}
CUES = {word: kind for kind in reversed(_KINDS) for word in _KINDS[kind].split()}

# Kinds of streets that are written as one word with the name: Hauptstrasse, Kerkstraat,
# Mannerheimintie, Storgatan.
STREET_END = re.compile(
    r"(?:strasse|str|stra|weg|platz|gasse|allee|damm|ufer|ring|straat|laan|plein|kade|gracht|dijk|singel|gata|gatan|gaten|vagen"
    r"|vegen|veien|vej|gade|katu|tie|kuja|polku|vagur|gotu|gasse|steig|chaussee|ulitsa|svingen|stien|gränd|grand|kaari|raitti)$"
)

_CODES = """AL AK AZ AR CA CO CT DE FL GA HI IA ID IL IN KS KY LA MA MD ME MI MN MO MS MT NC ND NE NH NJ NM NV NY OH OK OR PA RI
    SC SD TN TX UT VA VT WA WI WV WY DC PR AB BC MB NB NL NS ON PE QC SK YT NSW VIC QLD ACT USA UK US UAE EU"""
UPPER_CODES = frozenset(_CODES.split())
