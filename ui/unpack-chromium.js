// Unpacks the browser of the tests beside its package, and writes down how to launch it.
import { mkdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const folder = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".chromium");
mkdirSync(folder, { recursive: true });
process.env.TMPDIR = folder;
process.env.AWS_EXECUTION_ENV = "AWS_Lambda_nodejs22.x"; // the package unpacks its shared libraries only if it sees this
const { default: chromium } = await import("@sparticuz/chromium");
const path = await chromium.executablePath();
const launch = { path, libraries: process.env.LD_LIBRARY_PATH ?? "" };
writeFileSync(join(folder, "launch.json"), JSON.stringify(launch));
