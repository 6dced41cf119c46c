"""The words that invented names, addresses and places are made of. Knows nothing but words.

Common words of their kind, so that an invented name reads like a name and belongs to nobody in
particular.
"""

from __future__ import annotations

_GIVEN = """Ada Adam Agnes Alan Alba Albert Alec Alice Alma Amelia Amir Anders Andrea Anika Anna Anton Arthur Asha Aaron
    Beatrice Benedict Bella Bruno Camilla Carl Carla Carmen Cecilia Clara Conrad Cora Daniel Daria David Diana Diego
    Dora Edgar Edith Edwin Elena Elias Elisa Elsa Emil Emma Erik Esther Eva Felix Fiona Flora Frank Frida Gabriel George
    Gloria Grace Greta Gustav Hana Hannah Harold Hector Helen Henry Hugo Ida Igor Ines Irene Iris Ivan Jana Jasmine Joel
    Jonas Judith Julia Julian Karin Kate Kenji Klara Lara Laura Lea Leo Leon Lidia Lina Linus Louis Lucas Lucia Lydia
    Magnus Marco Maria Marian Martin Maya Mila Milan Miriam Nadia Nathan Nina Noah Nora Olga Oliver Oscar Otto Paula
    Peter Philip Rafael Ralph Rita Robert Rosa Ruth Samir Samuel Sara Selma Simon Sofia Stella Sven Tara Theo Thomas
    Tina Tobias Vera Victor Viola Walter Wanda Yara Yuki Zara"""
_FAMILY = """Abbott Acosta Adler Albers Almeida Andersen Arnold Bailey Banks Barnes Bauer Becker Bennett Berger Bishop
    Blake Blom Borg Bowman Brandt Brennan Brooks Burke Campos Carver Castillo Chandra Clarke Coleman Collins Cooper
    Correa Costa Crane Cruz Dalton Dawson Delgado Dietrich Doyle Duarte Eklund Ellis Falk Farrell Ferrari Fischer
    Fleming Flores Foster Fowler Franco Fuchs Gardner Garrett Gibson Gomez Gordon Graham Grant Greco Gupta Haas Hahn
    Hale Hansen Harper Hartmann Hayashi Hayes Heller Herrera Hoffman Holm Howard Hudson Ito Jansen Jensen Kaplan Keller
    Kelly Kemp Khan Kimura Klein Koch Kowalski Kramer Lang Larsen Lehmann Lindgren Lopez Lowe Lund Maier Malik Mann
    Marino Marsh Mason Mendes Meyer Mills Molina Moreau Moreno Morgan Nash Neumann Newman Nilsson Norris Novak Nowak
    Olsen Ortega Osborne Palmer Parker Patel Peters Pires Porter Quinn Ramos Reed Reyes Richter Rinaldi Rivera Romano
    Rossi Russo Santos Sato Schmitt Schubert Sharma Silva Simmons Soto Stein Stone Suzuki Tanaka Thorne Turner Vargas
    Vega Vogel Wagner Walsh Ward Weber Wells West Winkler Wolf Wood Yamada York Zimmer"""
_STREETS = """Alder Apple Aspen Bank Barley Beacon Beech Birch Bloom Bridge Brook Canal Castle Cedar Chapel Cherry
    Church Clay Clover Copper Corn Cotton Crown Dove Eagle East Elm Falcon Fern Field Forest Fox Garden Glen Grange
    Granite Green Grove Hazel Heron High Hill Holly Iron Ivy King Lake Larch Laurel Lemon Lily Lime Linden Long Main
    Maple Market Meadow Mill Moss North Oak Olive Orchard Park Pearl Pine Plum Pond Poplar Prospect Quarry Queen Raven
    Ridge River Robin Rose Rowan Sage School Shore Silver South Spring Spruce Station Stone Summer Sunset Swan Sycamore
    Thistle Union Valley Vine Walnut Water West Willow"""
_CITIES = """Aberdeen Adelaide Arles Austin Bergen Bilbao Bologna Boston Bremen Brighton Bristol Bruges Calgary Cardiff
    Chester Cologne Coimbra Cordoba Cork Dallas Delft Denver Dresden Dublin Durban Exeter Fresno Galway Geneva Genoa
    Ghent Glasgow Graz Halifax Hobart Izmir Kyoto Lausanne Leeds Leipzig Lille Limerick Linz Lucerne Lund Lyon Malaga
    Malmo Mantua Memphis Messina Nagoya Nantes Naples Nelson Odense Omaha Oporto Orlando Osaka Ottawa Oulu Padua Palermo
    Perth Pilsen Portland Porto Poznan Quito Reno Riga Rouen Salem Salzburg Seville Sheffield Siena Split Tampa Tampere
    Toledo Toulouse Trieste Tucson Turin Turku Utrecht Valencia Verona Vigo Wellington Windsor York Zagreb"""
_COUNTRIES = """Argentina Australia Austria Belgium Bolivia Botswana Brazil Bulgaria Canada Chile Colombia Croatia
    Cyprus Denmark Ecuador Egypt Estonia Finland France Germany Ghana Greece Hungary Iceland India Indonesia Ireland
    Italy Jamaica Japan Jordan Kenya Latvia Lithuania Malaysia Malta Mexico Morocco Namibia Nepal Netherlands Norway
    Panama Paraguay Peru Philippines Poland Portugal Romania Senegal Singapore Slovakia Slovenia Spain Sweden
    Switzerland Tanzania Thailand Tunisia Turkey Uganda Uruguay Vietnam Zambia"""
_STATES = """AL AR AZ CA CO CT DE FL GA IA ID IL IN KS KY LA MA MD ME MI MN MO MS MT NC ND NE NH NJ NM NV NY OH OK OR PA
    RI SC SD TN TX UT VA VT WA WI WV WY"""

GIVEN = tuple(_GIVEN.split())
FAMILY = tuple(_FAMILY.split())
STREETS = tuple(_STREETS.split())
CITIES = tuple(_CITIES.split())
COUNTRIES = tuple(_COUNTRIES.split())
STATES = tuple(_STATES.split())
# What says of which kind an address or a name is, and stays.
_KEPT = """street st avenue ave road rd boulevard blvd lane ln drive dr court ct terrace parkway pkwy highway hwy place
    pl square sq way crescent close row walk apt apartment suite ste unit flat floor fl room building po box p.o psc cmr
    apo fpo ap fpo aa ae zip rue calle via rua avenida plaza praca strasse str weg platz allee the of and de la le del
    da do von van der den du di el al mr mrs ms miss dr prof sir madam lord lady jr sr ii iii iv phd md esq"""
KEPT = frozenset(_KEPT.split())
