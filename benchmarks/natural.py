"""Texts that hold no personal data and look like it, in the forms in which prompts arrive, and
values that touch what stands beside them; a part of `benchmarks/privacy.py`.

`FORMS`: questions with options in five layouts, logs of sixteen systems, mathematics and science,
code in six languages and under a request. Made with a fixed seed from lists of our own; a row is
harmed when the default policy changes or drops it. `TOUCHING`: values beside letters of scripts
that are written without spaces, and in the fields of CSV; one passes when it is still in the text.

`labelled`: 1,448 prompts of public sets (the data folder beside the checkout), read by two readers.
natural.json.gz holds no text: by set and row the SHA-256 of what was read (its first 900 characters;
of rows marked "o" with options put behind them) and the places, types and kinds of what they found.
Rows are r (drawn by chance), e (rows in which the search of 2026-11-25 found something) or o.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Draw = random.Random
ROWS = 200

# Options and questions

LISTS = {
    "fruit": "Apple Banana Cherry Mango Peach Plum Olive Grape Lemon Fig Papaya Date Pear",
    "element": "Iron Gold Silver Copper Neon Argon Helium Carbon Iridium Radium Xenon Cobalt Tin",
    "planet": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune",
    "colour": "Red Green Blue Violet Scarlet Amber Ivory Hazel Olive Rose Brown White Black Gray",
    "unit": "Newton Joule Pascal Watt Kelvin Volt Ohm Tesla Henry Weber Hertz Ampere Coulomb Gray",
    "animal": "Lion Tiger Robin Jay Martin Wolf Fox Bear Swift Drake Falcon Heron Bass Pike",
    "month": "April May June August January March October",
    "virtue": "Hope Faith Grace Joy Charity Prudence Patience Honor Justice Mercy",
    "plant": "Lily Daisy Violet Rose Heather Ivy Iris Basil Rosemary Holly Fern Willow Ash",
    "language": "Python Java Ruby Julia Rust Swift Perl Scala Ada Pascal Haskell Go Kotlin Crystal",
    "gem": "Ruby Pearl Jade Amber Opal Crystal Diamond Emerald Topaz Garnet Beryl Coral",
    "continent": "Asia Africa Europe Australia Antarctica",
    "country": "Chad Jordan Georgia Israel Kenya Cuba India Malta Cyprus Chile Peru",
    "law": "Ohm's Hooke's Boyle's Newton's Charles's Kepler's Snell's Faraday's Lenz's Gauss's",
    "bone": "Femur Tibia Fibula Ulna Radius Clavicle Scapula Sternum Patella Atlas Axis",
    "city": "Paris London Sydney Austin Lincoln Houston Madison Florence Vienna Geneva Charlotte",
    "shape": "Square Circle Triangle Rhombus Hexagon Cone Cube Sphere Prism",
    "gas": "Methane Ethane Propane Butane Ozone Ammonia Neon Krypton",
    "coin": "Penny Nickel Dime Quarter Mark Franc Pound Dollar Sterling",
    "logic": "True False Both Neither",
    "sentence": "It_rises It_falls It_stays_the_same It_doubles Not_enough_information I_and_II_only "
    "All_of_the_above None_of_these The_first_two Only_III Wages_will_rise Supply_shifts_left",
    "term": "Mitosis Osmosis Meiosis Inflation Monopoly Tort Estoppel Consideration Due_process "
    "Habeas_corpus Free_radical Type_I_error Type_II_error Null_hypothesis Price_floor Market_power",
}  # fmt: skip
ASKED = (
    "Which of these is a {}?",
    "Which {} is the odd one out?",
    "Choose the {} that fits best.",
    "The {} named in the passage above is",
    "Question: which {} did the second experiment use?",
)
LAYOUTS = {"A. x": "{}. {}", "A) x": "{}) {}", "(A) x": "({}) {}", "1. x": "{}. {}", "- x": "- {1}"}


def options(layout: str) -> Callable[[Draw], str]:
    """A question with four options, on lines or on one."""

    def make(draw: Draw) -> str:
        kind = draw.choice(sorted(LISTS))
        some = [one.replace("_", " ") for one in LISTS[kind].split()]
        if draw.random() < 0.35:
            first = draw.choice(
                (draw.randint(2, 90), draw.randint(100, 9999), draw.randint(1500, 2020))
            )
            some = [str(first + step) for step in range(9)]
            if draw.random() < 0.3:
                some = [
                    f"{one} {draw.choice(('m/s', 'kg', 'J', 'N', 'K', 'years', 'cm', '%'))}"
                    for one in some
                ]
            elif draw.random() < 0.2:
                some = [f"{one}/{int(one) + draw.randint(1, 9)}" for one in some]
        marks = "1234" if layout == "1. x" else "ABCD"
        made = [
            LAYOUTS[layout].format(mark, one)
            for mark, one in zip(marks, draw.sample(some, min(4, len(some))), strict=False)
        ]
        question = draw.choice(ASKED).format(kind)
        between = draw.choice(("\n", "\n", " "))
        ends = draw.choice(("", "", "\nAnswer:", "\nAnswer with the letter only."))
        return f"{question}{draw.choice((chr(10), ' ', chr(10)))}{between.join(made)}{ends}"

    return make


# Logs: the lines of a system, with slots

LOGS = {
    "Android": "03-{d2} {t}.{n3}  {n4}  {n4} D PowerManagerService: acquireWakeLockInternal: lock={n9}, tag=\"*launch*\", ws=WorkSource{{{n5}}}, uid={n5}, pid={n4}|03-{d2} {t}.{n3}  {n4}  {n4} I WindowManager: Skipping AppWindowToken{{df0798e token=Token{{78af589 ActivityRecord{{3b04890 u0 com.tencent.qt.qtl/com.tencent.video.player.activity.PlayerActivity t{n3}}}}}}}",
    "Apache": "[Sun Dec 0{d1} {t} 2005] [notice] workerEnv.init() ok /etc/httpd/conf/workers2.properties|[Mon Dec 0{d1} {t} 2005] [error] mod_jk child workerEnv in error state {d1}|[Sun Dec 0{d1} {t} 2005] [notice] jk2_init() Found child {n4} in scoreboard slot {d1}",
    "BGL": "- 11178{n5} 2005.06.{d2} R{d2}-M1-N{d1}-C:J{d2}-U{d2} 2005-06-{d2}-{t2}.{n6} R{d2}-M1-N{d1}-C:J{d2}-U{d2} RAS KERNEL INFO instruction cache parity error corrected|- 11179{n5} 2005.06.{d2} R{d2}-M0-NE-C:J12-U11 2005-06-{d2}-{t2}.{n6} R{d2}-M0-NE-C:J12-U11 RAS KERNEL FATAL data TLB error interrupt",
    "Hadoop": "2015-10-{d2} {t},{n3} INFO [main] org.apache.hadoop.mapreduce.v2.app.MRAppMaster: Created MRAppMaster for application appattempt_14450{n5}_0{n3}_000001|2015-10-{d2} {t},{n3} WARN [RMCommunicator Allocator] org.apache.hadoop.hdfs.LeaseRenewer: Failed to renew lease for [DFSClient_NONMAPREDUCE_{n9}_1] for {n3} seconds.  Will retry shortly ...",
    "HDFS": "0811{d2} {n6} {n3} INFO dfs.DataNode$PacketResponder: PacketResponder {d1} for block blk_{n18} terminating|0811{d2} {n6} {d2} INFO dfs.FSNamesystem: BLOCK* NameSystem.addStoredBlock: blockMap updated: 10.251.{d2}.{d2}:50010 is added to blk_{n18} size {n8}",
    "HealthApp": "201712{d2}-{t}:{n3}|Step_LSC|3000{n4}|onStandStepChanged {n4}|201712{d2}-{t}:{n3}|Step_SPUtils|3000{n4}|setTodayTotalDetailSteps=15140{n8}##{n4}##{n6}##{n4}##{n5}##{n9}",
    "HPC": "{n6} node-{n3} unix.hw state_change.unavailable 10771{n5} 1 Component State Change: Component \\042alt0\\042 is in the unavailable state (HWID={n4})|{n6} gige7 unix.hw net.niff.up 10781{n5} 1 NIFF: node node-D{d1} has detected an available network connection on network 5.5.224.0 via interface alt0",
    "Linux": "Jun {d2} {t} combo sshd(pam_unix)[{n5}]: authentication failure; logname= uid=0 euid=0 tty=NODEVssh ruser= rhost=  user=root|Jul {d2} {t} combo kernel: Memory: 125{n3}k/129{n3}k available ({n4}k kernel code, {n4}k reserved, {n3}k data, {n3}k init, 0k highmem)|Jun {d2} {t} combo su(pam_unix)[{n5}]: session opened for user cyrus by (uid=0)",
    "Mac": "Jul  {d1} {t} calvisitor-10-105-160-95 kernel[0]: IOThunderboltSwitch<0>(0x0)::listenerCallback - Thunderbolt HPD packet for route = 0x0 port = 11 unplug = 0|Jul  {d1} {t} authorMacBook-Pro com.apple.CDScheduler[{d2}]: Thermal pressure state: 1 Memory pressure state: 0|Jul  {d1} {t} authorMacBook-Pro Safari[{n5}]: KeychainGetICDPStatus: status: off",
    "OpenSSH": "Dec {d2} {t} LabSZ sshd[{n5}]: pam_unix(sshd:auth): check pass; user unknown|Dec {d2} {t} LabSZ sshd[{n5}]: Failed password for invalid user webmaster from 10.0.{d2}.{d2} port {n5} ssh2|Dec {d2} {t} LabSZ sshd[{n5}]: Received disconnect from 192.168.0.{d2}: 11: Bye Bye [preauth]",
    "OpenStack": "nova-api.log.1.2017-05-16_13:53:08 2017-05-16 {t}.{n3} {n5} INFO nova.osapi_compute.wsgi.server [req-{uuid} {hex32} {hex32} - - -] 10.11.10.1 \"GET /v2/{hex32}/servers/detail HTTP/1.1\" status: 200 len: {n4} time: 0.{n7}|nova-compute.log.1.2017-05-16_13:55:31 2017-05-16 {t}.{n3} 2931 INFO nova.compute.claims [req-{uuid} {hex32} {hex32} - - -] [instance: {uuid}] Total memory: {n5} MB, used: 512.00 MB",
    "Proxifier": "[10.{d2} {t}] chrome.exe - proxy.cse.cuhk.edu.hk:5070 open through proxy proxy.cse.cuhk.edu.hk:5070 HTTPS|[10.{d2} {t}] chrome.exe - proxy.cse.cuhk.edu.hk:5070 close, {n4} bytes (1.{d2} KB) sent, {n5} bytes ({d2}.{d1} KB) received, lifetime 00:{d2}",
    "Spark": "17/06/0{d1} {t} INFO executor.CoarseGrainedExecutorBackend: Registered signal handlers for [TERM, HUP, INT]|17/06/0{d1} {t} INFO storage.BlockManager: Found block rdd_{d2}_{d1} locally|17/06/0{d1} {t} INFO executor.Executor: Finished task {d1}.0 in stage {d2}.0 (TID {n4}). {n4} bytes result sent to driver",
    "Thunderbird": "- 11315{n5} 2005.11.{d2} dn{n3} Nov {d2} {t} dn{n3}/dn{n3} crond(pam_unix)[{n4}]: session closed for user root|- 11315{n5} 2005.11.{d2} tbird-admin1 Nov {d2} {t} local@tbird-admin1 /apps/x86_64/system/ganglia-3.0.1/sbin/gmetad[{n4}]: data_thread() got not answer from any [Thunderbird_B{d1}] datasource",
    "Windows": "2016-09-{d2} {t}, Info                  CBS    Loaded Servicing Stack v6.1.7601.{n5} with Core: C:\\Windows\\winsxs\\amd64_microsoft-windows-servicingstack_31bf3856ad364e35_6.1.7601.{n5}_none_681aa442f6fed7f0\\cbscore.dll|2016-09-{d2} {t}, Info                  CSI    0000000{d1}@2016/9/27:20:{d2}:{d2}.{n3} WcpInitialize (wcp.dll version 0.0.0.6) called (stack @0x7fed806eb5d)",
    "Zookeeper": "2015-07-{d2} {t},{n3} - INFO  [QuorumPeer[myid=1]/0:0:0:0:0:0:0:0:2181:FastLeaderElection@{n3}] - Notification time out: {n4}|2015-08-{d2} {t},{n3} - WARN  [SendWorker:{n12}:QuorumCnxManager$SendWorker@{n3}] - Interrupted while waiting for message on queue",
    "nginx": "10.0.{d2}.{d2} - - [{d2}/Mar/2024:{t} +0000] \"GET /api/v1/items/{n5}?page={d1} HTTP/1.1\" 200 {n5} \"-\" \"Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/{n3}.0.0.0 Safari/537.36\"",
    "kubernetes": "E03{d2} {t}.{n6}       1 reflector.go:{n3}] k8s.io/client-go/informers/factory.go:{n3}: Failed to watch *v1.Node: Get \"https://10.96.0.1:443/api/v1/nodes?resourceVersion={n6}\": dial tcp 10.96.0.1:443: connect: connection refused|03-{d2} {t2} Pod web-{hex8}-x{d1}lk2 Back-off restarting failed container",
}  # fmt: skip
ABOVE = ("", "", "", "What went wrong here?\n", "Explain this log:\n", "Parse these lines into JSON:\n\n", "Why does my server do this?\n```\n")  # fmt: skip


def fill(template: str, draw: Draw) -> str:
    """The slots of a line of a log: d1, d2 and nK are digits."""

    def digits(count: int) -> str:
        return str(draw.randint(10 ** (count - 1), 10**count - 1))

    def hexadecimal(count: int) -> str:
        return "".join(draw.choice("0123456789abcdef") for _ in range(count))

    out = template.replace("{{", "\x01").replace("}}", "\x02")
    clock = lambda sign: sign.join(f"{draw.randrange(limit):02d}" for limit in (24, 60, 60))  # noqa: E731
    makers: dict[str, Callable[[], str]] = {
        "t": lambda: clock(":"),
        "t2": lambda: clock(":")[:5],
        "uuid": lambda: "-".join(hexadecimal(count) for count in (8, 4, 4, 4, 12)),
        "d1": lambda: str(draw.randint(1, 9)),
        "d2": lambda: str(draw.randint(10, 28)),
        **{f"n{count}": lambda count=count: digits(count) for count in range(2, 19)},
        **{f"hex{count}": lambda count=count: hexadecimal(count) for count in (8, 32)},
    }
    for slot, make in makers.items():
        while f"{{{slot}}}" in out:
            out = out.replace(f"{{{slot}}}", make(), 1)
    return out.replace("\x01", "{").replace("\x02", "}")


def log(draw: Draw) -> str:
    """Three to eight lines of one system."""
    lines = LOGS[draw.choice(sorted(LOGS))].split("|")
    if lines[0].startswith("201712"):  # its own sign between fields
        lines = ["|".join(lines[:4]), "|".join(lines[4:])]
    made = [fill(draw.choice(lines), draw) for _ in range(draw.randint(3, 8))]
    return draw.choice(ABOVE) + "\n".join(made)


# Mathematics and science

SCIENCE = (
    "A star has a surface temperature of {n} Kelvin. What is its peak wavelength by Wien's law?",
    "What is the electron configuration of iridium (Ir), and how does it differ from osmium (Os)?",
    "Find all primes $p$ such that $p^2+{n}$ divides ${n}!$.",
    "Compute the sum of the digits of ${n}{n}$.",
    "The Reynolds number of a pipe of {s} cm is {n}. Is the flow laminar?",
    "State Green's theorem and use it for $\\oint_C y\\,dx - x\\,dy$ on a circle of radius {s}.",
    "A capacitor of {s} Farad is charged to {n} Volts. How many Joules does it store?",
    "What is the Gibbs free energy at {s} Celsius if H = {n} J and S = {s} J/K?",
    "Explain the Doppler effect for a train at {s} m/s and a tone of {n} Hertz.",
    "Let G be a group of order {s}. How many Sylow {s}-subgroups can it have?",
    "In triangle ABC, AB = {s}, BC = {s} and angle B = 60 degrees. Find AC.",
    "Points P, Q and R lie on a circle with center O. If PQ = {s}, find QR.",
    "How many Na atoms are in {s} g of NaCl? Use Avogadro's number.",
    "Balance: Fe + O2 -> Fe2O3. How many grams of Fe react with {s} g of O2?",
    "What is the Hamming distance between the codes {n} and {n}?",
    "The Richter magnitude was {s}.{s}. By what factor did the energy grow?",
    "A patient has Hodgkin lymphoma of stage II. Which cells, named Reed-Sternberg, are seen?",
    "Describe Alzheimer's disease, Parkinson's disease and Huntington's disease in one table.",
    "Solve for x: {s}x + {s} = {n}.",
    "Evaluate \\int_0^{{{s}}} x^2 dx and round to {s} places.",
    "The halting problem is undecidable by Turing machines; what of a machine with {s} states?",
    "What is the half-life of Carbon-14 if {n} of {n} atoms decay in {s} years?",
    "A Petri dish holds {n} bacteria of E. coli; they double every {s} minutes.",
    "If f is Riemann integrable and g is Lebesgue integrable, is f + g Lebesgue integrable?",
    "Give the Taylor series of sin x at x = {s} to order {s}.",
    "Which has the greater mass, {s} mol of He or {s} mol of Ne?",
    "A mole of Cu, {s} moles of Ag and {n} g of Au are melted. What is the mass?",
    "A 1{n} kg satellite orbits Mars at {n} km. Find its period from Kepler's third law.",
    "Find the Fourier transform of exp(-{s} t) for t > 0.",
    "By Bayes' rule, what is P(A|B) if P(B|A) = 0.{s} and P(A) = 0.{s}?",
    "Is the Jacobian of (u, v) -> (u + {s} v, u v) singular? Give the Hessian as well.",
    "At STP, {s} L of gas follow Boyle's law, then Charles's law. What is V2?",
    "How do Golgi apparatus, Krebs cycle and Schwann cells relate to each other?",
    "Does a Faraday cage stop a field of {n} Tesla or {n} Gauss?",
    "Line 1: y = {s}x + {s}\nLine 2: y = {s}x - {s}\nWhere do they meet?",
    "In 19{s} the yield was {n}; in 20{s} it was {n}. Compute the growth per year.",
    "Convert {n} BTU to Joule, {s} Fahrenheit to Kelvin and {s} stone to kilograms.",
    "Who is right: the sum of 1/n^2 is pi^2/6 (Basel problem) or {s}/{s}?",
    "Machine A makes {s} parts an hour, Machine B {s}. Together they make {n} in how long?",
    "Box A weighs {s} kg, Box B {s} kg more, Box C twice as much as Box A. What is the total?",
    "Lou Gehrig's disease and Down syndrome: what is the cause of each?",
    "Use Stokes' theorem on F = ({s}y, {s}z, x). What is curl F?",
    "Round 0.{n}{n}{n} to four significant digits.",
    "An ideal Carnot engine works between {n} K and {s} K. What is its efficiency?",
    "What are the oxidation states of Mn in KMnO4, Cr in K2Cr2O7 and Cl in HClO4?",
    "Pascal's triangle, row {s}: what is the largest entry? And in Lucas numbers?",
)


def science(draw: Draw) -> str:
    """A question of mathematics, physics, chemistry, biology."""
    text = draw.choice(SCIENCE).replace("{{", "\x01").replace("}}", "\x02")
    while "{n}" in text:
        text = text.replace(
            "{n}", str(draw.choice((draw.randint(100, 9999), draw.randint(10**4, 10**7)))), 1
        )
    while "{s}" in text:
        text = text.replace("{s}", str(draw.randint(2, 99)), 1)
    return text.replace("\x01", "{").replace("\x02", "}")


# Code

CODE = (
    '#include <stdio.h>\n\nint main(void) {\n    const char *name = "x";\n    int grace = NUM;\n    for (int i = 0; i < NUM; i++) printf("%s %d\\n", name, i);\n    return 0;\n}',
    'static const char *VAR_names[] = { "Red", "Green", "Blue" };\nunsigned long VAR(const char *s, size_t n);',
    "template <typename T>\nclass Stack {\n public:\n  void Push(const T& value) { items_.push_back(value); }\n  T Pop();\n private:\n  std::vector<T> items_;\n};\n\nvoid VAR(const std::string& s, char delim = ' ');",
    'public class Main {\n    private final Map<String, Integer> VAR = new HashMap<>();\n\n    public static void main(String[] args) {\n        Scanner in = new Scanner(System.in);\n        System.out.println("Hello World " + NUM);\n    }\n}',
    'def VAR(items: list[int], limit: int = NUM) -> list[int]:\n    """Return the items below the limit.\n\n    Note: Order is kept. Raises ValueError for none.\n    """\n    return [one for one in items if one < limit]',
    "class Node:\n    def __init__(self, val=NUM, left=None, right=None):\n        self.val = val\n        self.left = left\n\n    def VAR(self):\n        # Walk the tree, In order\n        return (self.left.VAR() if self.left else 0) + self.val",
    "const express = require('express');\nconst app = express();\n\napp.get('/VAR', async (req, res) => {\n  const user = await User.findById(req.params.id);\n  res.json({ ok: true, count: NUM });\n});\napp.listen(NUM);",
    'func VAR(ctx context.Context, n int) (string, error) {\n\tif n > NUM {\n\t\treturn "", fmt.Errorf("too many: %d", n)\n\t}\n\tMax := n\n\treturn strconv.Itoa(Max), nil\n}',
    "fn VAR(s: &str) -> Result<u32, ParseIntError> {\n    let grace: u32 = s.trim().parse()?;\n    match grace {\n        0 => Ok(NUM),\n        Self::Max => Err(Error::Limit),\n        _ => Ok(grace),\n    }\n}",
    "SELECT c.Name, COUNT(*) AS VAR\nFROM Customer c JOIN Orders o ON o.CustomerId = c.Id\nWHERE o.Year = NUM AND c.State = 'CA'\nGROUP BY c.Name ORDER BY 2 DESC LIMIT NUM;",
    '#!/bin/bash\nset -euo pipefail\nfor f in /var/log/VAR/*.log; do\n  gzip -9 "$f" && echo "Done: $f" >> /tmp/out.NUM\ndone',
    "import numpy as np\nimport pandas as pd\n\ndf = pd.read_csv('VAR.csv')\ndf['Total'] = df['Price'] * NUM\nprint(df.groupby('Region').agg({'Total': 'sum'}).head(NUM))",
    '<div class="VAR">\n  <h1>Welcome Back</h1>\n  <img src="img/NUM.png" alt="Rose Garden">\n</div>\n<style>.VAR { color: #NUM; margin: 0 auto }</style>',
    'Dim VAR As Integer\nFor Each Cell In Range("A1:B20")\n    If Cell.Value > NUM Then Cell.Interior.Color = vbRed\nNext Cell',
    "struct Point { double x, y; };\ntypedef struct Node { int val; struct Node *next; } Node;\n\nNode *VAR(Node *head, int Val) {\n    Node *Cur = head;\n    while (Cur && Cur->val != Val) Cur = Cur->next;\n    return Cur;\n}",
    'const char VAR(char Ch, bool Upper);\nstd::cout << "Enter a Number: " << std::endl;\nstd::cin >> NUM_items;',
    'Traceback (most recent call last):\n  File "main.py", line NUM, in <module>\n    VAR(data)\n  File "lib/util.py", line 17, in VAR\n    return int(value)\nValueError: invalid literal for int() with base 10: \'Abc\'',
    "error[E0382]: borrow of moved value: `VAR`\n --> src/main.rs:NUM:20\n  |\nNUM |     let s2 = s1;\n  |              -- value moved here",
    "interface Props { Title: string; Max?: number }\nexport const VAR: React.FC<Props> = ({ Title, Max = NUM }) => {\n  const [open, setOpen] = useState<boolean>(false);\n  return <Dialog Title={Title} />;\n};",
    "data Tree a = Leaf | Node (Tree a) a (Tree a)\n\nVAR :: Ord a => a -> Tree a -> Tree a\nVAR x Leaf = Node Leaf x Leaf",
)
NAMES = "total parse_row maxValue count_items merge walk render toList fetch_all handler".split()
REQUESTS = (
    "What does this do?\n\n{}",
    "Fix the bug in this function.\n{}",
    "{}\n\nExplain the code above line by line.",
    "Translate to Rust:\n\n{}\n",
    "I get an error when I run this:\n```\n{}\n```\nHow do I fix it?",
    "Please add comments to my code. It is for a course.\n\n{}\n\nThanks!",
    "Review this change, mind the style: {}",
    "Convert the following code to TypeScript and use const.\n{}",
)


def code(draw: Draw) -> str:
    """A piece of code, alone."""
    text = draw.choice(CODE).replace("VAR", draw.choice(NAMES))
    while "NUM" in text:
        text = text.replace(
            "NUM", str(draw.choice((draw.randint(1, 99), draw.randint(100, 99999)))), 1
        )
    return text


def asked_code(draw: Draw) -> str:
    """Code under or above a request."""
    return draw.choice(REQUESTS).replace("{}", code(draw))


FORMS: dict[str, Callable[[Draw], str]] = {
    **{f"options, {layout}": options(layout) for layout in LAYOUTS},
    "logs": log,
    "mathematics and science": science,
    "code": code,
    "code under a request": asked_code,
}

# Values that touch what stands beside them

BESIDE = {
    "Chinese": ("我的{what}是{value}请查收", "请联系{value}谢谢", "{value}是我的"),
    "Japanese": ("私の{what}は{value}です", "連絡先は{value}まで", "{value}にお願いします"),
    "Thai": ("ติดต่อ{value}ได้เลย", "ของฉันคือ{value}ครับ"),
    "Arabic": ("رقمي هو و{value}شكرا", "تواصل معي ب{value}من فضلك"),
    "Korean": ("제 정보는{value}입니다", "연락처{value}로 주세요"),
    "Hindi": ("मेरा पता{value}है", "कृपया{value}पर भेजें"),
    "CSV": ("2026-01-02,20,{value}", "7,{value},true,3.5", "id,n\n12,{value}\n13,x", "a;1;{value};2"),
}  # fmt: skip
LANGUAGES = {"Chinese": "zh", "Japanese": "ja", "Thai": "th", "Arabic": "ar", "Korean": "ko", "Hindi": "hi"}  # fmt: skip
CSV_TYPES = ("CREDIT_CARD", "PHONE_NUMBER", "EMAIL_ADDRESS", "IP_ADDRESS", "IBAN_CODE", "US_SSN")


def touching(
    makers: dict[str, Callable[[Draw], str]], count: int
) -> Iterator[tuple[str, str, str, str]]:
    """Script, type, text and value. makers: by type, a value."""
    for script, sentences in BESIDE.items():
        for type, make in makers.items():
            if script == "CSV" and type not in CSV_TYPES:
                continue
            draw = Draw(f"{script} {type}")
            for number in range(count):
                value = make(draw)
                sentence = sentences[number % len(sentences)]
                yield script, type, sentence.format(what="号码", value=value), value


def forms(count: int = ROWS) -> Iterator[tuple[str, list[str]]]:
    """Each form with its texts."""
    for name, make in FORMS.items():
        draw = Draw(name)
        yield name, [make(draw) for _ in itertools.repeat(None, count)]


# Natural prompts

LABELS = Path(__file__).with_suffix(".json.gz")
MOST = 900  # characters of a prompt that were read
OPTION_MARKS = ("{}. ", "{}) ", "({}) ", "- ", "{}: ")
SHORT = {"P": "PERSON", "S": "STREET_ADDRESS", "N": "PHONE_NUMBER", "M": "EMAIL_ADDRESS", "K": "SECRET",
         "A": "IBAN_CODE", "D": "DATE_OF_BIRTH", "H": "HANDLE", "I": "IP_ADDRESS"}  # fmt: skip
WHO = {"p": "private", "u": "public", "i": "invented", "n": "none"}
SAME = {
    **dict.fromkeys(("PASSWORD", "API_KEY", "PRIVATE_KEY", "URL_CREDENTIALS"), "SECRET"),
    "US_SSN": "NATIONAL_ID",
}
SOURCES = {
    "templates clinc150 banking77 self-instruct-user self-instruct-seed": "requests",
    "multidogo program-records": "customers and records",
    "classic-books": "stories",
    "digitalgov-news 18f-blog": "posts",
    "python-docs-fr python-docs-es python-docs-en opensource.guide-de opensource.guide-en": "docs",
    "gsm8k program-math": "mathematics",
    "exercism-python tldr-pages": "code and commands",
}
FORM_OF = {source: form for sources, form in SOURCES.items() for source in sources.split()}


@dataclass(frozen=True)
class Natural:
    """A prompt that was read. is_tuned: of the half on which rules were made; spans: (type, start,
    end, who).
    """

    form: str
    stratum: str
    is_tuned: bool
    text: str
    spans: tuple[tuple[str, int, int, str], ...]


def user_rows(data: Path, name: str) -> list[tuple[str, str]]:
    """The user's turns of each row of a set, joined, and its source."""
    if name == "spec_bench":
        lines = (data / "prompts" / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines()
        return [("\n".join(json.loads(line)["turns"]), "spec_bench") for line in lines]
    with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        (
            "\n".join(one["content"] for one in row["messages"] if one["role"] == "user"),
            row.get("source") or name,
        )
        for row in rows
    ]


def with_options(text: str, number: int, book: str) -> str:
    """A question with four options of numbers or of capitals out of a book, by the row's number."""
    draw = Draw(number)
    layout, marks = OPTION_MARKS[number % 5], "1234" if number // 5 % 3 == 0 else "ABCD"
    if draw.random() < 0.5:
        first = draw.randrange(5, 400)
        some = [str(first + step) for step in draw.sample(range(-4, 60), 4)]
    else:
        words = sorted(set(re.findall(r"[A-Z][a-z]{3,}(?: [A-Z][a-z]{3,})?", book)))
        some = draw.sample(words, min(4, len(words)))
    lines = [layout.format(mark) + one for mark, one in zip(marks, some, strict=False)]
    return text[:600] + "\n" + (" " if number % 4 == 0 else "\n").join(lines)


def labelled(data: Path) -> list[Natural]:
    """The prompts that were read, rebuilt. Raises ValueError for a set that is another one."""
    found = []
    rows = {"instructions": user_rows(data, "instructions")}
    books = [
        text
        for text, source in rows["instructions"]
        if source in ("classic-books", "digitalgov-news")
    ]
    for name, labels in json.loads(gzip.decompress(LABELS.read_bytes())).items():
        texts = rows.get(name) or user_rows(data, name)
        for number, (stratum, digest, marks) in labels.items():
            text, source = texts[int(number)]
            text = text[:MOST]
            key = f"{name}:{number}"
            if stratum == "o":
                text, key = (
                    with_options(text, int(number), books[int(number) % len(books)]),
                    f"{key}:options",
                )
            if hashlib.sha256(text.encode()).hexdigest()[:8] != digest:
                raise ValueError(f"row {number} of {name} is not the one that was read")
            form = (
                "options"
                if stratum == "o"
                else FORM_OF.get(source, "Spec-Bench" if name == "spec_bench" else "dialogues")
            )
            spans = tuple((SHORT[kind[0]], start, end, WHO[kind[1]]) for kind, start, end in marks)
            is_tuned = int(hashlib.sha256(key.encode()).hexdigest(), 16) % 2 == 0
            found.append(Natural(form, stratum, is_tuned, text, spans))
    return found


def judge(rows: Iterable[Natural], find: Callable[[str], list[Any]]) -> dict[str, Any]:
    """By type: findings, of those right (they overlap a value of the type that the readers saw),
    and of those a private person's; private values, and of those found whole. By form, over rows
    drawn by chance and options: rows, those with a finding, those with one that is not private.
    """
    found, right, due, private, covered = (Counter[str]() for _ in range(5))
    forms: dict[str, list[int]] = {}
    for row in rows:
        places: set[int] = set()
        wrong = False
        findings = find(row.text)
        for one in findings:
            kind = SAME.get(one.type, one.type)
            over = [
                who
                for type, start, end, who in row.spans
                if type == kind and start < one.end and one.start < end
            ]
            found[kind] += 1
            right[kind] += bool(over)
            due[kind] += "private" in over
            wrong |= "private" not in over
            places.update(range(one.start, one.end))
        for type, start, end, who in row.spans:
            if who == "private":
                private[type] += 1
                covered[type] += all(
                    at in places for at in range(start, end) if row.text[at].isalnum()
                )
        if row.stratum != "e":
            counts = forms.setdefault(row.form, [0, 0, 0])
            counts[0] += 1
            counts[1] += bool(findings)
            counts[2] += wrong
    return {
        "types": {
            type: {
                "found": found[type], "right": right[type], "due": due[type],
                "private": private[type], "covered": covered[type],
            }
            for type in sorted({*found, *private})
        },
        "forms": {form: dict(zip(("rows", "changed", "wrongly"), counts, strict=True)) for form, counts in sorted(forms.items())},
    }  # fmt: skip
