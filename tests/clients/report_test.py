"""The load report in headless Chromium, without network: every plot must be on the screen.

Where the plots are is asked of a copy that carries a script; what is seen is the screenshot of the report itself, whose
pixels a second page counts."""
import base64
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

browser = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
if not browser:
    print("skipped: chromium is not installed (apt-get install chromium)")
    sys.exit(77)
folder = tempfile.mkdtemp()
WIDTH, HEIGHT = 1240, 4200
# Its own network namespace where the kernel allows one; the flags alone elsewhere.
ALONE = ["unshare", "-rn"] if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0 else []


def chromium(*arguments):
    return subprocess.run(
        ALONE + [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
                 "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                 "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}/profile",
                 "--virtual-time-budget=10000", f"--window-size={WIDTH},{HEIGHT}", *arguments],
        capture_output=True, text=True, timeout=120, check=True).stdout


def answer_of(page):
    """What a page's script has left in its title, as JSON."""
    with open(f"{folder}/asked.html", "w") as f:
        f.write(page)
    dom = chromium("--dump-dom", f"file://{folder}/asked.html")
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom, re.S).group(1)))


BOXES = """<script>document.title=JSON.stringify([...document.querySelectorAll('svg')].map(s=>{
const b=s.getBoundingClientRect();return[b.x,b.y,b.width,b.height]}))</script>"""
# Of each box's left three quarters (the legend stands in the right one): pixels of the colour of its last line.
COUNT = """<title></title><script>const image=new Image();image.onload=()=>{
const c=document.createElement('canvas');c.width=image.width;c.height=image.height;
const g=c.getContext('2d');g.drawImage(image,0,0);
document.title=JSON.stringify(%s.map(([x,y,w,h,colour])=>{
const want=[1,3,5].map(i=>parseInt(colour.substr(i,2),16)),d=g.getImageData(x,y,w*3/4,h).data;let n=0;
for(let i=0;i<d.length;i+=4)n+=want.every((v,k)=>Math.abs(d[i+k]-v)<48);return n}))};
image.src='data:image/png;base64,%s'</script>"""

report = f"{folder}/report.html"
subprocess.run([os.environ["KVASIR"], "bench", os.environ["KVASIR_GRPC"], "--sweep", "concurrency", "--sweep-low", "1",
                "--sweep-high", "4", "--duration", "3s", "--slo", "e2e=100s", "--input-len", "8", "--output-len", "8",
                "--verify", "3", "--html", report], check=True, stdout=subprocess.DEVNULL)
page = open(report).read()
plots = re.findall(r"<svg .*?</svg>", page, re.S)
assert len(plots) >= 10, f"{len(plots)} plots: a sweep has 4, latency 3, the timeline 3"
assert "nothing to show" not in page
assert "://" not in page and " src=" not in page, "the report must stand alone"

boxes = answer_of(re.sub(r"<meta http-equiv='Content-Security-Policy'[^>]*>", "", page) + BOXES)
assert len(boxes) == len(plots)
chromium(f"--screenshot={folder}/page.png", f"file://{report}")
for plot, box in zip(plots, boxes):
    box.append(re.findall(r"<polyline fill='none' stroke='(#\w+)'", plot)[-1])  # drawn over the others
seen = answer_of(COUNT % (json.dumps(boxes), base64.b64encode(open(f"{folder}/page.png", "rb").read()).decode()))
for plot, box, pixels in zip(plots, boxes, seen):
    name = html.unescape(re.search(r"aria-label='(.*?)'", plot).group(1))
    print(f"  {name}: {pixels} pixels of its line")
    assert box[1] + box[3] <= HEIGHT, f"{name} lies below the screenshot"
    assert pixels >= 40, f"the line of '{name}' is not to be seen; look at {folder}/page.png"
shutil.rmtree(folder)
print(f"all {len(plots)} plots are shown, without network" + (", in a namespace that has none" if ALONE else ""))
