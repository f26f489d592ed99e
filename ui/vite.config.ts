import { defineConfig } from "vite";

const server = process.env.PENSTOCK_URL ?? "http://127.0.0.1:8642";

export default defineConfig({
  base: "./",
  oxc: { jsx: { runtime: "automatic" } },
  build: {
    outDir: "../src/penstock/server/ui",
    emptyOutDir: true,
    target: "es2024",
    modulePreload: false,
    assetsInlineLimit: 0,
    license: { fileName: "licenses.md" },
    reportCompressedSize: false,
  },
  server: {
    proxy: {
      // The server refuses requests of other origins, so the proxy presents its own.
      "^/(api|docs|health|ready)": { target: server, changeOrigin: true, headers: { Origin: server } },
    },
  },
});
